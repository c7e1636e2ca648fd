{{- /* The bytes of a Kubernetes quantity (10Gi, 1.5G, 1e10, 128974848000m) or of a size for the server (8GiB, 32 GB). */}}
{{- define "histospec.bytes" -}}
{{- $text := toString . | nospace | trimSuffix "B" }}
{{- /* An exponent needs digits: 1E is one exa, 1E3 is a thousand. */}}
{{- $number := regexFind "^[0-9]*[.]?[0-9]*([eE][+-]?[0-9]+)?" $text }}
{{- $factors := dict "" 1.0 "n" 1e-9 "u" 1e-6 "m" 1e-3 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18
  "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- $suffix := trimPrefix $number $text }}
{{- mulf (float64 $number) (get $factors $suffix) | printf "%.0f" }}
{{- end }}

{{- /* A size for the server, from bytes: in GiB if it is a whole number of GiB, else in MiB, rounded down. */}}
{{- define "histospec.size" -}}
{{- $mib := div (. | float64 | int64) 1048576 }}
{{- if or (mod $mib 1024) (not $mib) }}{{ $mib }}MiB{{ else }}{{ div $mib 1024 }}GiB{{ end }}
{{- end }}

{{- /* The bytes beside the index that options add to those of their defaults: what waits for the store, and three times the
largest message, which arrives, lies in one piece and is decoded. */}}
{{- define "histospec.added" -}}
{{- $backlog := index .Values.options "max-backlog" | default "256MiB" | include "histospec.bytes" | float64 }}
{{- $message := index .Values.options "max-message" | default "64MiB" | include "histospec.bytes" | float64 }}
{{- addf (subf $backlog 268435456.0 | maxf 0.0) (subf $message 67108864.0 | maxf 0.0 | mulf 3.0) | printf "%.0f" }}
{{- end }}

{{- /* The bytes of the default index for a memory limit. Takes root, limit in bytes. */}}
{{- define "histospec.sizedIndex" -}}
{{- $limit := float64 .limit }}
{{- $most := minf (mulf $limit 0.8) (subf $limit 2147483648.0) }}
{{- subf (maxf $most (divf $limit 4.0)) (include "histospec.added" .root | float64) | maxf 0.0 | printf "%.0f" }}
{{- end }}

{{- /* The bytes of the largest index for a memory limit: server/settings/budget.py says what the process needs besides the
index. Takes root, limit in bytes. */}}
{{- define "histospec.largestIndex" -}}
{{- $limit := float64 .limit }}
{{- $fits := divf (subf $limit 536870912.0) 1.15 }}
{{- $most := minf (mulf $limit 0.85) (maxf $fits (divf $limit 4.0)) }}
{{- subf $most (include "histospec.added" .root | float64) | maxf 0.0 | printf "%.0f" }}
{{- end }}

{{- define "histospec.memoryLimit" -}}
{{- with (.Values.resources.limits).memory }}{{ include "histospec.bytes" . }}{{ end }}
{{- end }}

{{- /* The budget of the index: as given, or computed from the limit; empty without a limit. */}}
{{- define "histospec.memory" -}}
{{- $limit := include "histospec.memoryLimit" . }}
{{- if .Values.options.memory }}
{{- .Values.options.memory }}
{{- else if $limit }}
{{- include "histospec.sizedIndex" (dict "root" . "limit" $limit) | include "histospec.size" }}
{{- end }}
{{- end }}

{{- /* The size of the volume of /data according to the values; empty if the node determines it. */}}
{{- define "histospec.volumeSize" -}}
{{- if include "histospec.claims" . }}
{{- .Values.persistence.size }}
{{- else if not (include "histospec.hostPath" .) }}
{{- .Values.emptyDir.dataSize }}
{{- end }}
{{- end }}

{{- /* options.disk as text: 0, also as a number, is a value. */}}
{{- define "histospec.givenDisk" -}}
{{- dig "disk" "" .Values.options | toString }}
{{- end }}

{{- /* The limit of the SQLite file: as given, or 90 % of the volume, which leaves room for the write-ahead log. */}}
{{- define "histospec.disk" -}}
{{- if eq .Values.store.kind "sqlite" }}
{{- $volume := include "histospec.volumeSize" . }}
{{- $given := include "histospec.givenDisk" . }}
{{- if $given }}
{{- $given }}
{{- else if $volume }}
{{- mulf (include "histospec.bytes" $volume | float64) 0.9 | include "histospec.size" }}
{{- end }}
{{- end }}
{{- end }}
