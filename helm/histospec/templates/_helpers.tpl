{{- define "histospec.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimAll "-." }}
{{- end }}

{{- /* At most 40 characters, because the name of a pod is also a label and Kubernetes appends to it. */}}
{{- define "histospec.fullname" -}}
{{- $name := include "histospec.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimAll "-." }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimAll "-." }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimAll "-." }}
{{- end }}
{{- end }}

{{- define "histospec.selector" -}}
app.kubernetes.io/name: {{ include "histospec.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* Labels: an object's own, then the chart's, then commonLabels. Takes root, and perhaps labels and a selector other than
that of the shards. */}}
{{- define "histospec.labels" -}}
{{- $selector := .selector | default (include "histospec.selector" .root) | fromYaml }}
{{- $standard := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") }}
{{- /* A label of a selector in commonLabels would let Services find the pods of backups and tests. */}}
{{- $common := omit (.root.Values.commonLabels | default dict) "app.kubernetes.io/name" "app.kubernetes.io/instance" }}
{{- merge dict (.labels | default dict) $selector $standard $common | toYaml }}
{{- end }}

{{- /* Labels of pods: what histospec.labels says, without given labels that would take a pod from its selector. Takes root,
component, given, and perhaps a selector. */}}
{{- define "histospec.podLabels" -}}
{{- $given := omit (.given | default dict) "app.kubernetes.io/name" "app.kubernetes.io/instance" }}
{{- $labels := merge (dict "app.kubernetes.io/component" .component) $given }}
{{- include "histospec.labels" (dict "root" .root "selector" .selector "labels" $labels) }}
{{- end }}

{{- /* The metadata of an object. Takes what histospec.labels takes, name, and perhaps annotations. */}}
{{- define "histospec.metadata" -}}
name: {{ .name | quote }}
labels: {{- include "histospec.labels" . | nindent 2 }}
{{- with merge dict (.annotations | default dict) (.root.Values.commonAnnotations | default dict) }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "histospec.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- /* The host name that resolves to the addresses of all shards. */}}
{{- define "histospec.shards" -}}
{{ include "histospec.fullname" . }}-headless.{{ .Release.Namespace }}.svc:6378
{{- end }}

{{- define "histospec.service" -}}
{{ include "histospec.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* Whether workers call their node's address: it has a port for the shard, and no certificate that lacks its address. */}}
{{- define "histospec.onNode" -}}
{{- $covered := or (not (include "histospec.tlsSecret" .)) .Values.tls.certManager.ipAddresses }}
{{- if and (eq .Values.mode "daemonset") (int .Values.daemonset.hostPort) $covered }}true{{ end }}
{{- end }}

{{- /* The endpoint for workers, for the notes; at the node's address it needs HISTOSPEC_HOST_IP. */}}
{{- define "histospec.endpoint" -}}
{{- if eq .Values.mode "statefulset" }}
{{- printf "discover://%s" (include "histospec.shards" .) }}
{{- else if include "histospec.onNode" . }}
{{- printf "$(HISTOSPEC_HOST_IP):%d" (int64 .Values.daemonset.hostPort) }}
{{- else }}
{{- printf "%s:6378" (include "histospec.service" .) }}
{{- end }}
{{- end }}

{{- /* The chart creates tokens unless the user has some or wants none. */}}
{{- define "histospec.makesTokens" -}}
{{- if and .Values.tokens.create (not .Values.tokens.existingSecret) (not .Values.security.insecure) }}true{{ end }}
{{- end }}

{{- define "histospec.tokensSecret" -}}
{{- if include "histospec.makesTokens" . }}
{{- include "histospec.fullname" . }}-tokens
{{- else }}
{{- .Values.tokens.existingSecret }}
{{- end }}
{{- end }}

{{- /* Whether callers must authenticate. */}}
{{- define "histospec.guarded" -}}
{{- if or (include "histospec.tokensSecret" .) .Values.tls.clientCA.existingSecret }}true{{ end }}
{{- end }}

{{- /* Labels of this chart's pods that call the shards. The NetworkPolicy admits them; no Service selects them. */}}
{{- define "histospec.callerLabels" -}}
app.kubernetes.io/part-of: {{ include "histospec.fullname" . | quote }}
{{- end }}

{{- /* The peers that the NetworkPolicy admits, in words. */}}
{{- define "histospec.peers" -}}
{{- if .Values.networkPolicy.sameNamespace }}the pods of this namespace{{ if .Values.networkPolicy.from }}, and {{ end }}{{ end }}
{{- if .Values.networkPolicy.from }}the peers that networkPolicy.from names
{{- else if not .Values.networkPolicy.sameNamespace }}no pods but the chart's own
{{- end }}
{{- end }}

{{- /* The Service with the HTTP port, which is never published outside the cluster. */}}
{{- define "histospec.httpService" -}}
{{ include "histospec.fullname" . }}{{ if ne .Values.service.type "ClusterIP" }}-http{{ end }}
{{- end }}

{{- /* The names of the Services and of their pods, as a YAML list. */}}
{{- define "histospec.hostNames" -}}
{{- $headless := printf "%s-headless" (include "histospec.fullname" .) }}
{{- $services := list (include "histospec.fullname" .) (include "histospec.httpService" .) }}
{{- if eq .Values.mode "statefulset" }}
{{- $services = concat $services (list $headless (printf "*.%s" $headless)) }}
{{- end }}
{{- range $service := uniq $services }}
{{- range list "" ".NAMESPACE" ".NAMESPACE.svc" ".NAMESPACE.svc.cluster.local" }}
- {{ printf "%s%s" $service (replace "NAMESPACE" $.Release.Namespace .) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The Secret with the certificate of the shards; empty without TLS. */}}
{{- define "histospec.tlsSecret" -}}
{{- if .Values.tls.certManager.enabled }}
{{- include "histospec.fullname" . }}-tls
{{- else }}
{{- .Values.tls.existingSecret }}
{{- end }}
{{- end }}

{{- /* The name of a pod's service account; empty for the namespace's default. Takes account, its values, and name, that of an
account that the chart makes. */}}
{{- define "histospec.serviceAccount" -}}
{{- .account.name | default (.account.create | ternary .name "") }}
{{- end }}

{{- /* Whether the values say that no shard runs. */}}
{{- define "histospec.stopped" -}}
{{- if and (eq .Values.mode "statefulset") (not .Values.autoscaling.enabled) (eq (int .Values.replicas) 0) }}true{{ end }}
{{- end }}

{{- /* Whether each shard has a persistent volume. */}}
{{- define "histospec.claims" -}}
{{- if and (eq .Values.mode "statefulset") (eq .Values.store.kind "sqlite") .Values.persistence.enabled }}true{{ end }}
{{- end }}

{{- /* The folder of the node that holds a shard's SQLite file, if any. */}}
{{- define "histospec.hostPath" -}}
{{- if and (eq .Values.mode "daemonset") (eq .Values.store.kind "sqlite") }}{{ .Values.daemonset.hostPath }}{{ end }}
{{- end }}

{{- /* Whether `helm test` can authenticate without further values. */}}
{{- define "histospec.tests" -}}
{{- $trusts := and (or .Values.tls.certManager.enabled (not .Values.tls.existingSecret)) (not .Values.tls.clientCA.existingSecret) }}
{{- if and .Values.test.enabled (or .Values.test.args (and $trusts (not .Values.tokens.existingSecret))) }}true{{ end }}
{{- end }}

{{- /* Seconds that a shard needs to end: the wait before SIGTERM, and the drain. */}}
{{- define "histospec.endSeconds" -}}
{{- add .Values.preStopSeconds (dig "drain-seconds" 20 .Values.options | float64 | ceil | int) }}
{{- end }}
