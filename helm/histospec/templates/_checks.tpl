{{- /* Checks of values that contradict each other. */}}
{{- define "histospec.check" -}}
{{- include "histospec.checkVersion" . }}
{{- include "histospec.checkAccess" . }}
{{- include "histospec.checkStore" . }}
{{- include "histospec.checkEnvironment" . }}
{{- include "histospec.checkSizes" . }}
{{- include "histospec.checkScaling" . }}
{{- include "histospec.checkExisting" . }}
{{- end }}

{{- /* `helm upgrade --reuse-values` takes all defaults from the previous chart, which lacks newer values. */}}
{{- define "histospec.checkVersion" -}}
{{- if not (and (hasKey .Values "emptyDir") (hasKey .Values "scaleDown") (hasKey .Values.tokens "create") (hasKey .Values.tokens "callers")) }}
{{- fail "these are the defaults of an older chart, which --reuse-values keeps: pass your own values with --values FILE, or use --reset-then-reuse-values. Read the upgrade notes in docs/kubernetes.md first" }}
{{- end }}
{{- end }}

{{- define "histospec.checkAccess" -}}
{{- $v := .Values }}
{{- if and (not (include "histospec.guarded" .)) (not $v.security.insecure) }}
{{- fail "tokens.create is false, so any caller could read and write every history: set tokens.existingSecret or tls.clientCA.existingSecret, or set security.insecure to true to allow it" }}
{{- end }}
{{- $callers := list }}
{{- range $v.tokens.callers }}
{{- if has .name $callers }}
{{- printf "tokens.callers: the name %s appears twice; to replace a token, change its rotation" .name | fail }}
{{- end }}
{{- $callers = append $callers .name }}
{{- end }}
{{- if and $callers (not (include "histospec.makesTokens" .)) }}
{{- fail "tokens.callers: the chart makes no tokens here; put these callers into the file of tokens.existingSecret (docs/security.md), or set tokens.create to true, and leave tokens.existingSecret empty and security.insecure false" }}
{{- end }}
{{- if and $v.tls.clientCA.existingSecret (not $v.tls.existingSecret) }}
{{- fail "tls.clientCA.existingSecret: client certificates need TLS; set tls.existingSecret, too" }}
{{- end }}
{{- if ne $v.service.type "ClusterIP" }}
{{- if not (include "histospec.guarded" .) }}
{{- printf "service.type %s publishes the shards beyond the cluster: set security.insecure to false, and set tokens.create, tokens.existingSecret or tls.clientCA.existingSecret" $v.service.type | fail }}
{{- end }}
{{- if not $v.tls.existingSecret }}
{{- printf "service.type %s publishes the shards beyond the cluster, where tokens and responses need TLS: set tls.existingSecret" $v.service.type | fail }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Kubernetes keeps one of two variables of a name, and refuses both with server-side apply. */}}
{{- define "histospec.checkEnvironment" -}}
{{- $names := list "HISTOSPEC_SHARD_NAME" "MALLOC_TRIM_THRESHOLD_" "MALLOC_MMAP_THRESHOLD_" "MALLOC_TOP_PAD_" }}
{{- range .Values.extraEnv }}
{{- if has .name $names }}
{{- printf "extraEnv: the variable %s is there twice, or the chart sets it" .name | fail }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- $names = list }}
{{- range .Values.backup.extraEnv }}
{{- if has .name $names }}
{{- printf "backup.extraEnv: the variable %s is there twice" .name | fail }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}

{{- define "histospec.checkStore" -}}
{{- $v := .Values }}
{{- if contains "@" $v.store.url }}
{{- fail "store.url is stored in a ConfigMap and must not contain a user or a password: put the URL into a Secret, and name it in store.existingSecret" }}
{{- end }}
{{- if and (eq $v.store.kind "redis") (not $v.store.url) (not $v.store.existingSecret) }}
{{- fail "store.kind redis needs a URL: set store.url or store.existingSecret" }}
{{- end }}
{{- if and $v.store.url $v.store.existingSecret }}
{{- fail "store.url and store.existingSecret: set only one of them" }}
{{- end }}
{{- if and (eq $v.store.kind "sqlite") (or $v.store.url $v.store.existingSecret) }}
{{- fail "store.url and store.existingSecret need store.kind redis, but it is sqlite" }}
{{- end }}
{{- end }}

{{- define "histospec.checkScaling" -}}
{{- $v := .Values }}
{{- if $v.autoscaling.enabled }}
{{- if ne $v.mode "statefulset" }}
{{- fail "autoscaling.enabled: mode daemonset always has one shard per node" }}
{{- end }}
{{- if ne $v.store.kind "redis" }}
{{- fail "autoscaling.enabled needs store.kind redis: with sqlite, problems that move to another shard lose their history" }}
{{- end }}
{{- if lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas) }}
{{- fail "autoscaling.maxReplicas is less than autoscaling.minReplicas" }}
{{- end }}
{{- end }}
{{- end }}
