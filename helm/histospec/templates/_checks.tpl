{{- /* Values that are each sound, and make no sense together. */}}
{{- define "histospec.check" -}}
{{- include "histospec.checkVersion" . }}
{{- include "histospec.checkAccess" . }}
{{- include "histospec.checkStore" . }}
{{- include "histospec.checkSizes" . }}
{{- include "histospec.checkScaling" . }}
{{- include "histospec.checkExisting" . }}
{{- end }}

{{- /* `helm upgrade --reuse-values` takes all defaults from the chart before, which knew less. */}}
{{- define "histospec.checkVersion" -}}
{{- if not (and (hasKey .Values "emptyDir") (hasKey .Values "scaleDown") (hasKey .Values.tokens "create")) }}
{{- fail "these are the defaults of an older chart, as --reuse-values brings them: pass your own values with --values FILE, or use --reset-then-reuse-values. Read the upgrade notes in docs/kubernetes.md first" }}
{{- end }}
{{- end }}

{{- define "histospec.checkAccess" -}}
{{- $v := .Values }}
{{- if and (not (include "histospec.guarded" .)) (not $v.security.insecure) }}
{{- fail "tokens.create is false, so that any caller could read and write every history: give tokens.existingSecret or tls.clientCA.existingSecret, or set security.insecure to true to allow it" }}
{{- end }}
{{- if and $v.tls.clientCA.existingSecret (not $v.tls.existingSecret) }}
{{- fail "tls.clientCA.existingSecret: clients show certificates only over TLS; give tls.existingSecret, too" }}
{{- end }}
{{- if ne $v.service.type "ClusterIP" }}
{{- if not (include "histospec.guarded" .) }}
{{- printf "service.type %s publishes the shards beyond the cluster: security.insecure must be false there; let tokens.create make tokens, or give tokens.existingSecret or tls.clientCA.existingSecret" $v.service.type | fail }}
{{- end }}
{{- if not $v.tls.existingSecret }}
{{- printf "service.type %s publishes the shards beyond the cluster, where tokens and responses need TLS: give tls.existingSecret" $v.service.type | fail }}
{{- end }}
{{- end }}
{{- end }}

{{- define "histospec.checkStore" -}}
{{- $v := .Values }}
{{- if contains "@" $v.store.url }}
{{- fail "store.url is kept in a ConfigMap, and must not hold a user or a password: put the URL into a Secret, and name it in store.existingSecret" }}
{{- end }}
{{- if and (eq $v.store.kind "redis") (not $v.store.url) (not $v.store.existingSecret) }}
{{- fail "store.kind is redis: say where it is with store.url or store.existingSecret" }}
{{- end }}
{{- if and $v.store.url $v.store.existingSecret }}
{{- fail "store.url and store.existingSecret: give one of them" }}
{{- end }}
{{- if and (eq $v.store.kind "sqlite") (or $v.store.url $v.store.existingSecret) }}
{{- fail "store.url and store.existingSecret are for store.kind redis; it is sqlite" }}
{{- end }}
{{- end }}

{{- define "histospec.checkScaling" -}}
{{- $v := .Values }}
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
