{{- /* The common part of backup and restore: one pod that runs a command against all shards. */}}

{{- /* The Secret with the token for the shards; empty if they ask for none. */}}
{{- define "histospec.backup.tokenSecret" -}}
{{- if .Values.backup.tokenSecret }}
{{- .Values.backup.tokenSecret }}
{{- else if include "histospec.makesTokens" . }}
{{- include "histospec.tokensSecret" . }}
{{- end }}
{{- end }}

{{- define "histospec.backup.selector" -}}
app.kubernetes.io/name: {{ include "histospec.name" . }}-backup
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* The metadata of an object for backups. Takes root and name. */}}
{{- define "histospec.backup.metadata" -}}
{{- include "histospec.metadata" (dict "root" .root "selector" (include "histospec.backup.selector" .root)
  "labels" (dict "app.kubernetes.io/component" "backup") "name" (printf "%s-%s" (include "histospec.fullname" .root) .name)) }}
{{- end }}

{{- define "histospec.backup.place" -}}
{{ .Values.backup.destination.url | default "/backups/" }}
{{- end }}

{{- /* The address of all shards, for --from or --to. */}}
{{- define "histospec.backup.service" -}}
{{- $v := .Values }}
- {{ eq $v.mode "statefulset" | ternary (printf "discover://%s" (include "histospec.shards" .)) (printf "%s:6378" (include "histospec.service" .)) }}
{{- if eq $v.store.kind "sqlite" }}
{{- /* Each shard has its own history, so a backup must have all of them. */}}
- --shards
- {{ max 1 (int $v.replicas) | quote }}
{{- end }}
- --namespace
- {{ $v.backup.namespaces | quote }}
{{- if include "histospec.backup.tokenSecret" . }}
- --token-file
- /etc/histospec/token/{{ $v.backup.tokenKey }}
{{- end }}
{{- if include "histospec.tlsSecret" . }}
- --tls-ca
- /etc/histospec/tls/ca.crt
{{- if $v.tls.clientCA.existingSecret }}
- --tls-cert
- /etc/histospec/tls/tls.crt
- --tls-key
- /etc/histospec/tls/tls.key
{{- end }}
{{- end }}
{{- end }}

{{- /* The specification of a Job. Takes the chart's context and the list of arguments. */}}
{{- define "histospec.backup.job" -}}
{{- $root := .root }}
{{- $v := $root.Values -}}
backoffLimit: 2
activeDeadlineSeconds: {{ int64 $v.backup.deadlineSeconds }}
template:
  metadata:
    labels: {{- include "histospec.podLabels" (dict "root" $root "component" "backup" "given" $v.backup.podLabels
      "selector" (include "histospec.backup.selector" $root)) | nindent 6 }}
    {{- with $v.backup.podAnnotations }}
    annotations: {{- toYaml . | nindent 6 }}
    {{- end }}
  spec:
    restartPolicy: Never
    automountServiceAccountToken: false
    enableServiceLinks: false
    {{- with include "histospec.serviceAccount" (dict "account" $v.backup.serviceAccount "name" (printf "%s-backup" (include "histospec.fullname" $root))) }}
    serviceAccountName: {{ . | quote }}
    {{- end }}
    {{- with $v.imagePullSecrets }}
    imagePullSecrets: {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext: {{- toYaml $v.podSecurityContext | nindent 6 }}
    containers:
      - name: {{ .name }}
        image: {{ include "histospec.image" $root | quote }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        args: {{- .args | nindent 10 }}
        {{- with $v.backup.destination.existingSecret }}
        envFrom:
          - secretRef:
              name: {{ . | quote }}
        {{- end }}
        {{- with $v.backup.extraEnv }}
        env: {{- toYaml . | nindent 10 }}
        {{- end }}
        securityContext: {{- toYaml $v.securityContext | nindent 10 }}
        resources: {{- toYaml $v.backup.resources | nindent 10 }}
        volumeMounts:
          - name: tmp
            mountPath: /tmp
          {{- if $v.backup.destination.persistentVolumeClaim }}
          - name: backups
            mountPath: /backups
          {{- end }}
          {{- if include "histospec.backup.tokenSecret" $root }}
          - name: token
            mountPath: /etc/histospec/token
            readOnly: true
          {{- end }}
          {{- if include "histospec.tlsSecret" $root }}
          - name: tls
            mountPath: /etc/histospec/tls
            readOnly: true
          {{- end }}
    volumes:
      - name: tmp
        emptyDir:
          sizeLimit: 64Mi
      {{- with $v.backup.destination.persistentVolumeClaim }}
      - name: backups
        persistentVolumeClaim:
          claimName: {{ . | quote }}
      {{- end }}
      {{- with include "histospec.backup.tokenSecret" $root }}
      - name: token
        secret:
          secretName: {{ . | quote }}
          defaultMode: 0440
          items: [{key: {{ $v.backup.tokenKey | quote }}, path: {{ $v.backup.tokenKey | quote }}}]
      {{- end }}
      {{- with include "histospec.tlsSecret" $root }}
      - name: tls
        secret:
          secretName: {{ $v.backup.tlsSecret | default . | quote }}
          defaultMode: 0440
          items:
            - {key: ca.crt, path: ca.crt}
            {{- if $v.tls.clientCA.existingSecret }}
            - {key: tls.crt, path: tls.crt}
            - {key: tls.key, path: tls.key}
            {{- end }}
      {{- end }}
    {{- with $v.nodeSelector }}
    nodeSelector: {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $v.tolerations }}
    tolerations: {{- toYaml . | nindent 6 }}
    {{- end }}
{{- end }}

{{- define "histospec.backup.snapshot" -}}
- snapshot
- {{ include "histospec.backup.place" . }}
- --keep
- {{ int64 .Values.backup.keep | quote }}
- --from
{{ include "histospec.backup.service" . | trim }}
{{- end }}

{{- define "histospec.backup.restore" -}}
- restore
- {{ include "histospec.backup.place" . }}
- --merge  # so that a restarted Job adds nothing twice
- --to
{{ include "histospec.backup.service" . | trim }}
{{- end }}
