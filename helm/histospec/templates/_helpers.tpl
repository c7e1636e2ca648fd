{{- define "histospec.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- /* At most 40 characters: the name of a pod is a label, and Kubernetes adds to it. */}}
{{- define "histospec.fullname" -}}
{{- $name := include "histospec.name" . }}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "histospec.selector" -}}
app.kubernetes.io/name: {{ include "histospec.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "histospec.labels" -}}
{{ include "histospec.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "histospec.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- /* The name behind which every shard's own address is. */}}
{{- define "histospec.shards" -}}
{{ include "histospec.fullname" . }}-headless.{{ .Release.Namespace }}.svc:6378
{{- end }}

{{- define "histospec.service" -}}
{{ include "histospec.fullname" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- /* What workers set, for notes; in mode daemonset with a host port it needs HISTOSPEC_HOST_IP, see the notes. */}}
{{- define "histospec.endpoint" -}}
{{- if eq .Values.mode "statefulset" }}
{{- printf "discover://%s" (include "histospec.shards" .) }}
{{- else if .Values.daemonset.hostPort }}
{{- printf "$(HISTOSPEC_HOST_IP):%v" .Values.daemonset.hostPort }}
{{- else }}
{{- printf "%s:6378" (include "histospec.service" .) }}
{{- end }}
{{- end }}

{{- define "histospec.guarded" -}}
{{- if or .Values.tokens.existingSecret .Values.tls.clientCA.existingSecret }}true{{ end }}
{{- end }}

{{- define "histospec.drainSeconds" -}}
{{ index .Values.options "drain-seconds" | default 20 }}
{{- end }}

{{- /* Values that are each sound, and make no sense together. */}}
{{- define "histospec.check" -}}
{{- $v := .Values }}
{{- if and (not (include "histospec.guarded" .)) (not $v.security.insecure) }}
{{- fail "security.insecure is false: give tokens.existingSecret or tls.clientCA.existingSecret" }}
{{- end }}
{{- if and $v.tls.clientCA.existingSecret (not $v.tls.existingSecret) }}
{{- fail "tls.clientCA.existingSecret: clients show certificates only over TLS; give tls.existingSecret, too" }}
{{- end }}
{{- if and (eq $v.store.kind "redis") (not $v.store.url) (not $v.store.existingSecret) }}
{{- fail "store.kind is redis: say where it is with store.url or store.existingSecret" }}
{{- end }}
{{- if and $v.store.url $v.store.existingSecret }}
{{- fail "store.url and store.existingSecret: give one of them" }}
{{- end }}
{{- if and (eq $v.store.kind "sqlite") (or $v.store.url $v.store.existingSecret) }}
{{- fail "store.url and store.existingSecret are for store.kind redis, which is sqlite" }}
{{- end }}
{{- if and (ne $v.store.kind "sqlite") (hasKey $v.options "disk") }}
{{- fail "options.disk limits the file of store.kind sqlite; what Redis holds is limited by its maxmemory" }}
{{- end }}
{{- if $v.autoscaling.enabled }}
{{- if ne $v.mode "statefulset" }}
{{- fail "autoscaling.enabled: mode daemonset has one shard a node" }}
{{- end }}
{{- if ne $v.store.kind "redis" }}
{{- fail "autoscaling.enabled needs store.kind redis: with sqlite, problems that move to another shard lose their history" }}
{{- end }}
{{- if lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas) }}
{{- fail "autoscaling.maxReplicas is less than autoscaling.minReplicas" }}
{{- end }}
{{- end }}
{{- end }}
