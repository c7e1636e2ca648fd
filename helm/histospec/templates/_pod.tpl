{{- /* The pod of a shard, the same under a StatefulSet and a DaemonSet. */}}
{{- define "histospec.pod" -}}
metadata:
  labels:
    {{- include "histospec.labels" . | nindent 4 }}
    app.kubernetes.io/component: shard
    {{- with .Values.podLabels }}{{ toYaml . | nindent 4 }}{{ end }}
  annotations:
    # A change of the options rolls the shards.
    checksum/config: {{ include "histospec.toml" . | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false  # they would put HISTOSPEC_… variables of Kubernetes' own beside the server's
  {{- with .Values.serviceAccountName }}
  serviceAccountName: {{ . }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  securityContext: {{- toYaml .Values.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ add .Values.preStopSeconds (include "histospec.drainSeconds" . | float64 | ceil | int) 10 }}
  containers:
    - name: histospec
      image: {{ include "histospec.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/histospec/config/histospec.toml]
      env:
        - name: HISTOSPEC_SHARD_NAME
          valueFrom:
            fieldRef:
              {{- /* What survives a restart: an ordinal's pod name, or the node. */}}
              fieldPath: {{ eq .Values.mode "statefulset" | ternary "metadata.name" "spec.nodeName" }}
        {{- with .Values.store.existingSecret }}
        - name: HISTOSPEC_STORE
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $.Values.store.existingSecretKey }}
        {{- end }}
        # Large blocks stay with the process: about twice the steps a second at 16 streams.
        - name: MALLOC_TRIM_THRESHOLD_
          value: "268435456"
        - name: MALLOC_MMAP_THRESHOLD_
          value: "33554432"
        - name: MALLOC_TOP_PAD_
          value: "16777216"
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      ports:
        - name: grpc
          containerPort: 6378
          {{- if and (eq .Values.mode "daemonset") .Values.daemonset.hostPort }}
          hostPort: {{ .Values.daemonset.hostPort }}
          {{- end }}
        - name: http
          containerPort: 9464
      # Alive while it still reads its store, so that a large one is not killed for being large.
      startupProbe:
        httpGet:
          path: /livez
          port: http
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet:
          path: /livez
          port: http
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      # Both go the moment that a drain begins.
      readinessProbe:
        {{- if .Values.tls.existingSecret }}
        httpGet:
          path: /readyz
          port: http
        {{- else }}
        grpc:
          port: 6378
          service: histospec.v1.DraftService
        {{- end }}
        periodSeconds: 5
        timeoutSeconds: 3
        failureThreshold: 2
      {{- if .Values.preStopSeconds }}
      lifecycle:
        preStop:
          exec:
            command: [sleep, {{ .Values.preStopSeconds | quote }}]
      {{- end }}
      securityContext: {{- toYaml .Values.securityContext | nindent 8 }}
      resources: {{- toYaml .Values.resources | nindent 8 }}
      volumeMounts:
        - name: config
          mountPath: /etc/histospec/config
          readOnly: true
        - name: data
          mountPath: /data
        - name: tmp
          mountPath: /tmp
        {{- range list "tokens" "tls" "client-ca" }}
        {{- if include (printf "histospec.secret.%s" .) $ }}
        - name: {{ . }}
          mountPath: /etc/histospec/{{ . }}
          readOnly: true
        {{- end }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "histospec.fullname" . }}
    - name: tmp
      emptyDir: {}
    {{- if not (include "histospec.claims" .) }}
    - name: data
      {{- if and (eq .Values.mode "daemonset") .Values.daemonset.hostPath (eq .Values.store.kind "sqlite") }}
      hostPath:
        path: {{ .Values.daemonset.hostPath }}
        type: DirectoryOrCreate
      {{- else }}
      emptyDir: {}
      {{- end }}
    {{- end }}
    {{- /* Whole folders, not single files: so a new token or certificate arrives without a restart. */}}
    {{- range list "tokens" "tls" "client-ca" }}
    {{- with include (printf "histospec.secret.%s" .) $ }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
  {{- if and (eq .Values.mode "statefulset") .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range .Values.topologySpreadConstraints }}
    {{- $selector := dict "matchLabels" (include "histospec.selector" $ | fromYaml) }}
    - {{- merge (deepCopy .) (dict "labelSelector" $selector) | toYaml | nindent 6 }}
    {{- end }}
  {{- end }}
  {{- with .Values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{- /* Whether each shard has a volume of its own that outlives it. */}}
{{- define "histospec.claims" -}}
{{- if and (eq .Values.mode "statefulset") (eq .Values.store.kind "sqlite") .Values.persistence.enabled }}true{{ end }}
{{- end }}

{{- define "histospec.secret.tokens" -}}
{{- with .Values.tokens.existingSecret -}}
- name: tokens
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.tokens.key }}, path: tokens.toml}]
{{- end }}
{{- end }}

{{- define "histospec.secret.tls" -}}
{{- with .Values.tls.existingSecret -}}
- name: tls
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end }}

{{- define "histospec.secret.client-ca" -}}
{{- with .Values.tls.clientCA.existingSecret -}}
- name: client-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: {{ $.Values.tls.clientCA.key }}, path: ca.crt}]
{{- end }}
{{- end }}

{{- /* The file of options: the chart's own, then the user's. */}}
{{- define "histospec.toml" -}}
listen = "0.0.0.0:6378"
http = "0.0.0.0:9464"
data-dir = "/data"
{{- if not .Values.store.existingSecret }}
store = {{ .Values.store.url | default "sqlite" | quote }}
{{- end }}
{{- if .Values.tokens.existingSecret }}
tokens = "/etc/histospec/tokens/tokens.toml"
{{- end }}
{{- if .Values.tls.existingSecret }}
tls-cert = "/etc/histospec/tls/tls.crt"
tls-key = "/etc/histospec/tls/tls.key"
{{- end }}
{{- if .Values.tls.clientCA.existingSecret }}
tls-client-ca = "/etc/histospec/client-ca/ca.crt"
{{- end }}
{{- if not (include "histospec.guarded" .) }}
insecure = true
{{- end }}
{{- range $key, $value := .Values.options }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
