{{- /* The label `job` of the shards, which the ServiceMonitor sets and the rules select. It names the release, so that the
       shards of two releases never count as one service. */}}
{{- define "histospec.job" -}}
{{- .Values.prometheusRule.job | default (printf "%s/%s" .Release.Namespace (include "histospec.fullname" .)) }}
{{- end }}

{{- /* A regular expression for the names of the pods. */}}
{{- define "histospec.pods" -}}
{{- include "histospec.fullname" . }}-{{ eq .Values.mode "statefulset" | ternary "[0-9]+" "[a-z0-9]{5}" }}
{{- end }}

{{- /* files/alerts.yaml, limited to the shards of this release. */}}
{{- define "histospec.rules" -}}
{{- $job := printf "job=%q" (include "histospec.job" .) }}
{{- .Files.Get "files/alerts.yaml" | replace "job=~\".+\"" $job | replace "job=~\".*histospec.*\"" $job }}
{{- end }}

{{- /* files/alerts-kubernetes.yaml, limited to the shards of this release. */}}
{{- define "histospec.kubernetesRules" -}}
{{- $text := .Files.Get "files/alerts-kubernetes.yaml" }}
{{- $text = replace "\"NAMESPACE\"" (quote .Release.Namespace) $text }}
{{- $text = replace "\"NAME\"" (include "histospec.fullname" . | quote) $text }}
{{- $text = replace "\"NAME-backup" (printf "\"%s-backup" (include "histospec.fullname" .)) $text }}
{{- $text = replace "BACKUP_HOURS" (int64 .Values.backup.maxAgeHours | toString) $text }}
{{- $text = replace "[50h]" (printf "[%dh]" (int64 .Values.backup.maxAgeHours)) $text }}
{{- $text = replace "\"PODS\"" (include "histospec.pods" . | quote) $text }}
{{- replace "\"JOB\"" (include "histospec.job" . | quote) $text }}
{{- end }}

{{- /* Adds the release's labels and links to each rule of a list, and removes the disabled rules. */}}
{{- define "histospec.ruleList" -}}
{{- $kept := list }}
{{- range .rules }}
{{- if not (has .alert $.without) }}
{{- $_ := set .labels "namespace" $.root.Release.Namespace }}
{{- $_ := set .annotations "runbook_url" (print $.root.Values.prometheusRule.runbookBase .annotations.runbook_url) }}
{{- $kept = append $kept . }}
{{- end }}
{{- end }}
{{- toYaml $kept }}
{{- end }}
