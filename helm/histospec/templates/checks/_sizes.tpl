{{- /* Values that are no size at all. The schema would answer with a regular expression. */}}
{{- define "histospec.checkQuantities" -}}
{{- $v := .Values }}
{{- range $option, $bounds := dict "memory" (list "1MiB" "128TiB") "disk" (list "1MiB" "128TiB") "max-backlog" (list "1MiB" "128TiB")
  "max-message" (list "1KiB" "1GiB") }}
{{- $value := dig $option "" $v.options | toString }}
{{- $none := and (eq $option "disk") (eq $value "0") }}
{{- if not (or $none (regexMatch "^([0-9]+([.][0-9]+)? ?([KMGT]i?)?B)?$" $value)) }}
{{- printf "options.%s is %s; must be a size for the server, such as 8GiB or 500MB" $option $value | include "histospec.problem" }}
{{- else if and $value (not $none) }}
{{- $bytes := include "histospec.bytes" $value | float64 }}
{{- if or (lt $bytes (first $bounds | include "histospec.bytes" | float64)) (gt $bytes (last $bounds | include "histospec.bytes" | float64)) }}
{{- printf "options.%s is %s; must be from %s to %s" $option $value (first $bounds) (last $bounds) | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
{{- $quantities := dict "persistence.size" $v.persistence.size "emptyDir.dataSize" $v.emptyDir.dataSize "emptyDir.tmpSize" $v.emptyDir.tmpSize }}
{{- range $owner, $resources := dict "resources" $v.resources "backup.resources" $v.backup.resources }}
{{- range $kind := list "requests" "limits" }}
{{- range $name, $value := get $resources $kind | default dict }}
{{- $_ := set $quantities (printf "%s.%s.%s" $owner $kind $name) $value }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $value := $quantities }}
{{- if not (regexMatch "^([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][+-]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$" (toString $value)) }}
{{- printf "%s is %v; must be a quantity of Kubernetes, such as 10Gi or 500M" $name $value | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Sizes that do not fit each other. */}}
{{- define "histospec.checkSizes" -}}
{{- $v := .Values }}
{{- $limit := include "histospec.memoryLimit" . | default "0" | float64 }}
{{- if $limit }}
{{- $memory := include "histospec.bytes" (include "histospec.memory" .) | float64 }}
{{- $said := printf "options.memory is %s, and resources.limits.memory is %v" (include "histospec.memory" .) $v.resources.limits.memory }}
{{- $most := include "histospec.largestIndex" (dict "root" . "limit" $limit) | float64 }}
{{- $least := include "histospec.size" (subf $limit $most) }}
{{- if lt $most 1048576.0 }}
{{- printf "resources.limits.memory is %v, and the process needs that much besides its index: raise the limit, or lower options.max-backlog or options.max-message" $v.resources.limits.memory | include "histospec.problem" }}
{{- else if ge $memory $limit }}
{{- printf "%s: the index alone would fill the container. Give it at most %s, leave options.memory empty, or raise the limit" $said (include "histospec.size" $most) | include "histospec.problem" }}
{{- else if and (gt $memory $most) (not $v.sizing.allowTight) }}
{{- printf "%s: the process needs %s besides its index, or the kernel may kill it. Give the index at most %s, leave options.memory empty, raise the limit, or set sizing.allowTight to true" $said $least (include "histospec.size" $most) | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- $disk := include "histospec.givenDisk" . }}
{{- if and (ne $v.store.kind "sqlite") $disk }}
{{- include "histospec.problem" "options.disk limits the file of store.kind sqlite; for Redis, set its maxmemory" }}
{{- end }}
{{- $volume := include "histospec.volumeSize" . }}
{{- if and $volume $disk }}
{{- if gt (include "histospec.bytes" $disk | float64) (include "histospec.bytes" $volume | float64) }}
{{- printf "options.disk is %s, but the volume has only %s (%s): leave options.disk empty for 90 %% of the volume, or enlarge it" $disk $volume (include "histospec.claims" . | empty | ternary "emptyDir.dataSize" "persistence.size") | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
