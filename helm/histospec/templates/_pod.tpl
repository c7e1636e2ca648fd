{{- /* The pod of a shard, the same under a StatefulSet and a DaemonSet. */}}
{{- define "histospec.pod" -}}
metadata:
  labels: {{- include "histospec.podLabels" (dict "root" . "component" "shard" "given" .Values.podLabels) | nindent 4 }}
  annotations:
    # A change of the options restarts the shards.
    checksum/config: {{ include "histospec.toml" . | sha256sum }}
    {{- with .Values.podAnnotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  automountServiceAccountToken: false
  enableServiceLinks: false  # otherwise Kubernetes would add HISTOSPEC_… variables of its own
  {{- with include "histospec.serviceAccount" (dict "account" .Values.serviceAccount "name" (include "histospec.fullname" .)) }}
  serviceAccountName: {{ . | quote }}
  {{- end }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  {{- with .Values.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with .Values.hostAliases }}
  hostAliases: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.dnsConfig }}
  dnsConfig: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- toYaml .Values.podSecurityContext | nindent 4 }}
  terminationGracePeriodSeconds: {{ int .Values.terminationGracePeriodSeconds | default (add 10 (include "histospec.endSeconds" .)) }}
  containers:
    - name: histospec
      image: {{ include "histospec.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      args: [serve, --config, /etc/histospec/config/histospec.toml]
      env:
        - name: HISTOSPEC_SHARD_NAME
          valueFrom:
            fieldRef:
              {{- /* A name that survives a restart: the pod's ordinal name, or the node's. */}}
              fieldPath: {{ eq .Values.mode "statefulset" | ternary "metadata.name" "spec.nodeName" }}
        # Keeps large blocks in the process: about twice the steps per second at 16 streams.
        - name: MALLOC_TRIM_THRESHOLD_
          value: "268435456"
        - name: MALLOC_MMAP_THRESHOLD_
          value: "33554432"
        - name: MALLOC_TOP_PAD_
          value: "16777216"
        {{- with .Values.extraEnv }}{{ toYaml . | nindent 8 }}{{ end }}
      {{- with .Values.extraEnvFrom }}
      envFrom: {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        - name: grpc
          containerPort: 6378
          {{- if and (eq .Values.mode "daemonset") (int .Values.daemonset.hostPort) }}
          hostPort: {{ int64 .Values.daemonset.hostPort }}
          {{- end }}
        - name: http
          containerPort: 9464
      # /livez answers as soon as the process listens, whatever the state of its store.
      startupProbe:
        httpGet:
          path: /livez
          port: http
        {{- toYaml .Values.startupProbe | nindent 8 }}
      livenessProbe:
        httpGet:
          path: /livez
          port: http
        {{- toYaml .Values.livenessProbe | nindent 8 }}
      # Both fail as soon as a drain begins.
      readinessProbe:
        {{- if include "histospec.tlsSecret" . }}
        httpGet:
          path: /readyz
          port: http
        {{- else }}
        grpc:
          port: 6378
          service: histospec.v1.DraftService
        {{- end }}
        {{- toYaml .Values.readinessProbe | nindent 8 }}
      {{- $hooks := deepCopy .Values.lifecycle }}
      {{- if and (int .Values.preStopSeconds) (not $hooks.preStop) }}
      {{- $_ := set $hooks "preStop" (dict "exec" (dict "command" (list "sleep" (int64 .Values.preStopSeconds | toString)))) }}
      {{- end }}
      {{- with $hooks }}
      lifecycle: {{- toYaml . | nindent 8 }}
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
        {{- range list "tokens" "tls" "client-ca" "store" }}
        {{- if include (printf "histospec.secret.%s" .) $ }}
        - name: {{ . }}
          mountPath: /etc/histospec/{{ . }}
          readOnly: true
        {{- end }}
        {{- end }}
        {{- with .Values.extraVolumeMounts }}{{ toYaml . | nindent 8 }}{{ end }}
    {{- with .Values.extraContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- if or (include "histospec.hostPath" .) .Values.initContainers }}
  initContainers:
    {{- if include "histospec.hostPath" . }}
    # The node makes the folder for root, and fsGroup does not change folders of the node.
    - name: own-data
      image: {{ include "histospec.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      command: [python, -c, "import os, sys; os.chown(sys.argv[1], int(sys.argv[2]), -1); os.chmod(sys.argv[1], 0o700)"]
      args: [/data, {{ dig "runAsUser" (dig "runAsUser" 65532 (.Values.podSecurityContext | default dict)) (.Values.securityContext | default dict) | int64 | quote }}]
      securityContext:
        runAsUser: 0
        runAsNonRoot: false
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL], add: [CHOWN, FOWNER]}
      volumeMounts:
        - name: data
          mountPath: /data
    {{- end }}
    {{- with .Values.initContainers }}{{ toYaml . | nindent 4 }}{{ end }}
  {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ include "histospec.fullname" . | quote }}
    - name: tmp
      emptyDir:
        sizeLimit: {{ toString .Values.emptyDir.tmpSize | quote }}
    {{- if not (include "histospec.claims" .) }}
    - name: data
      {{- if include "histospec.hostPath" . }}
      hostPath:
        path: {{ include "histospec.hostPath" . | quote }}
        type: DirectoryOrCreate
      {{- else }}
      emptyDir:
        sizeLimit: {{ toString .Values.emptyDir.dataSize | quote }}
      {{- end }}
    {{- end }}
    {{- /* Mount whole folders, not single files, so that a new token, certificate or password arrives without a restart. */}}
    {{- range list "tokens" "tls" "client-ca" "store" }}
    {{- with include (printf "histospec.secret.%s" .) $ }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- end }}
    {{- with .Values.extraVolumes }}{{ toYaml . | nindent 4 }}{{ end }}
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

{{- define "histospec.secret.tokens" -}}
{{- with include "histospec.tokensSecret" . -}}
- name: tokens
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ include "histospec.makesTokens" $ | empty | ternary $.Values.tokens.key "tokens.toml" | quote }}, path: tokens.toml}]
{{- end }}
{{- end }}

{{- define "histospec.secret.store" -}}
{{- with .Values.store.existingSecret -}}
- name: store
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ $.Values.store.existingSecretKey | quote }}, path: url}]
{{- end }}
{{- end }}

{{- define "histospec.secret.tls" -}}
{{- with include "histospec.tlsSecret" . -}}
- name: tls
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end }}

{{- define "histospec.secret.client-ca" -}}
{{- with .Values.tls.clientCA.existingSecret -}}
- name: client-ca
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ $.Values.tls.clientCA.key | quote }}, path: ca.crt}]
{{- end }}
{{- end }}

{{- /* The file of options: the chart's own options, then the user's. */}}
{{- define "histospec.toml" -}}
listen = "0.0.0.0:6378"
http = "0.0.0.0:9464"
data-dir = "/data"
{{- if .Values.store.existingSecret }}
store-file = "/etc/histospec/store/url"
{{- else }}
store = {{ .Values.store.url | default "sqlite" | quote }}
{{- end }}
{{- with include "histospec.disk" . }}
disk = {{ . | quote }}
{{- end }}
{{- with include "histospec.memory" . }}
memory = {{ . | quote }}
{{- end }}
{{- if include "histospec.tokensSecret" . }}
tokens = "/etc/histospec/tokens/tokens.toml"
{{- end }}
{{- if include "histospec.tlsSecret" . }}
tls-cert = "/etc/histospec/tls/tls.crt"
tls-key = "/etc/histospec/tls/tls.key"
{{- end }}
{{- if .Values.tls.clientCA.existingSecret }}
tls-client-ca = "/etc/histospec/client-ca/ca.crt"
{{- end }}
{{- if not (include "histospec.guarded" .) }}
insecure = true
{{- end }}
# The names of the Services, at which the HTTP port answers besides the pod's address.
http-hosts = {{ concat (include "histospec.hostNames" . | fromYamlArray) (index .Values.options "http-hosts" | default list) | toJson }}
{{- range $key, $value := omit .Values.options "disk" "memory" "http-hosts" }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
