{{- /* Bytes of a Kubernetes quantity (10Gi, 1.5G, 1e10, 128974848000m) or of a size of the server (8GiB, 32 GB). */}}
{{- define "histospec.bytes" -}}
{{- $text := toString . | nospace | trimSuffix "B" }}
{{- /* An exponent needs digits: 1E is one exa, 1E3 is a thousand. */}}
{{- $number := regexFind "^[0-9]*[.]?[0-9]*([eE][+-]?[0-9]+)?" $text }}
{{- $factors := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
  "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- $suffix := trimPrefix $number $text }}
{{- if or (not (regexMatch "[0-9]" $number)) (not (hasKey $factors $suffix)) }}
{{- printf "%v is not a quantity; write a number with a unit, such as 10Gi or 500M" . | fail }}
{{- end }}
{{- mulf (float64 $number) (get $factors $suffix) | printf "%.0f" }}
{{- end }}

{{- /* A size for the server, from bytes: whole GiB where it is some, else MiB, rounded down. */}}
{{- define "histospec.size" -}}
{{- $mib := div (. | float64 | int64) 1048576 }}
{{- if or (mod $mib 1024) (not $mib) }}{{ $mib }}MiB{{ else }}{{ div $mib 1024 }}GiB{{ end }}
{{- end }}

{{- /* Bytes that a limit must leave beside the index. Takes root, limit in bytes, and a share of the limit.
The process needs 2 GiB in any case (half of a limit under 4 GiB), and whatever options.max-backlog has beyond the
256 MiB that this includes. */}}
{{- define "histospec.headroom" -}}
{{- $limit := float64 .limit }}
{{- $most := maxf (mulf $limit .share) (minf 2147483648.0 (divf $limit 2.0)) }}
{{- $backlog := include "histospec.bytes" (index .root.Values.options "max-backlog" | default "256MiB") | float64 }}
{{- maxf 0.0 (subf $backlog 268435456.0) | addf $most | printf "%.0f" }}
{{- end }}

{{- define "histospec.memoryLimit" -}}
{{- with (.Values.resources.limits).memory }}{{ include "histospec.bytes" . }}{{ end }}
{{- end }}

{{- /* Budget of the index: as given, or 80 % of the limit at most; nothing where there is no limit. */}}
{{- define "histospec.memory" -}}
{{- $limit := include "histospec.memoryLimit" . }}
{{- if .Values.options.memory }}
{{- .Values.options.memory }}
{{- else if $limit }}
{{- subf (float64 $limit) (include "histospec.headroom" (dict "root" . "limit" $limit "share" 0.2) | float64) | include "histospec.size" }}
{{- end }}
{{- end }}

{{- /* The size of what /data is on, as the values give it; nothing where the node decides. */}}
{{- define "histospec.volumeSize" -}}
{{- if include "histospec.claims" . }}
{{- .Values.persistence.size }}
{{- else if not (include "histospec.hostPath" .) }}
{{- .Values.emptyDir.dataSize }}
{{- end }}
{{- end }}

{{- /* Limit of the SQLite file: as given, or 90 % of the volume: the write-ahead log comes on top. */}}
{{- define "histospec.disk" -}}
{{- if eq .Values.store.kind "sqlite" }}
{{- $volume := include "histospec.volumeSize" . }}
{{- if .Values.options.disk }}
{{- .Values.options.disk }}
{{- else if $volume }}
{{- mulf (include "histospec.bytes" $volume | float64) 0.9 | include "histospec.size" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Sizes that are each sound, and do not fit each other. */}}
{{- define "histospec.checkSizes" -}}
{{- $v := .Values }}
{{- $limit := include "histospec.memoryLimit" . | default "0" | float64 }}
{{- if $limit }}
{{- $memory := include "histospec.bytes" (include "histospec.memory" .) | float64 }}
{{- $said := printf "options.memory is %s, and resources.limits.memory is %v" (include "histospec.memory" .) $v.resources.limits.memory }}
{{- $headroom := include "histospec.headroom" (dict "root" . "limit" $limit "share" 0.15) | float64 }}
{{- $room := subf $limit $headroom }}
{{- if le $room 1048576.0 }}
{{- printf "resources.limits.memory is %v, of which %s must stay free beside the index; raise it, or lower options.max-backlog" $v.resources.limits.memory (include "histospec.size" $headroom) | fail }}
{{- end }}
{{- if ge $memory $limit }}
{{- printf "%s: the index alone would not fit; give it at most %s, or leave options.memory empty" $said (include "histospec.size" $room) | fail }}
{{- end }}
{{- if and (gt $memory $room) (not $v.sizing.allowTight) }}
{{- printf "%s: %s must stay free beside the index, or the kernel may kill the shard. Give the index at most %s, leave options.memory empty, raise the limit, or set sizing.allowTight" $said (include "histospec.size" $headroom) (include "histospec.size" $room) | fail }}
{{- end }}
{{- end }}
{{- if and (ne $v.store.kind "sqlite") $v.options.disk }}
{{- fail "options.disk limits the file of store.kind sqlite; what Redis holds is limited by its maxmemory" }}
{{- end }}
{{- $volume := include "histospec.volumeSize" . }}
{{- if and $volume $v.options.disk }}
{{- if gt (include "histospec.bytes" $v.options.disk | float64) (include "histospec.bytes" $volume | float64) }}
{{- printf "options.disk is %s, and the volume has %s (%s): leave options.disk empty for 90 %% of the volume, or enlarge it" $v.options.disk $volume (include "histospec.claims" . | empty | ternary "emptyDir.dataSize" "persistence.size") | fail }}
{{- end }}
{{- end }}
{{- end }}
