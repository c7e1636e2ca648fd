{{- /* Checks of values that contradict each other. Each check returns its problems, a line each. */}}
{{- define "histospec.problems" -}}
{{- $problems := include "histospec.checkPresent" . }}
{{- if not $problems }}
{{- $problems = include "histospec.checkQuantities" . }}
{{- end }}
{{- if not $problems }}
{{- range list "Name" "Access" "Store" "Environment" "Sizes" "Ending" "Scaling" "Monitoring" "Backup" "Existing" }}
{{- $problems = print $problems (include (printf "histospec.check%s" .) $) }}
{{- end }}
{{- end }}
{{- $problems }}
{{- end }}

{{- define "histospec.problem" }}
- {{ . }}
{{- end }}

{{- /* An empty section removes its defaults, and null the default of a value. `helm upgrade --reuse-values` takes all defaults from the previous chart, which
lacks newer values. */}}
{{- define "histospec.checkPresent" -}}
{{- $missing := list }}
{{- $sections := list "scaleDown" "image" "options" "sizing" "resources" "store" "persistence" "persistence.retentionPolicy"
  "emptyDir" "daemonset" "tokens" "tokens.create" "tokens.callers" "security" "tls" "tls.certManager" "tls.certManager.issuerRef"
  "tls.clientCA" "networkPolicy" "service" "updateStrategy" "lifecycle" "startupProbe" "livenessProbe" "readinessProbe"
  "podDisruptionBudget" "autoscaling" "serviceMonitor" "prometheusRule" "dashboard" "backup" "backup.destination"
  "backup.resources" "backup.serviceAccount" "serviceAccount" "test" }}
{{- /* Without one of these values, a template fails, or renders what the default does not. */}}
{{- $values := list "mode" "replicas" "image.repository" "image.pullPolicy" "store.kind" "store.url" "store.existingSecret"
  "store.existingSecretKey" "persistence.enabled" "persistence.size" "persistence.storageClass" "persistence.accessModes"
  "persistence.retentionPolicy.whenScaled" "persistence.retentionPolicy.whenDeleted" "emptyDir.dataSize" "emptyDir.tmpSize"
  "daemonset.hostPath" "tokens.existingSecret" "tokens.key" "tls.existingSecret" "tls.certManager.issuerRef.kind"
  "tls.certManager.issuerRef.group" "tls.clientCA.key" "networkPolicy.enabled" "networkPolicy.sameNamespace" "networkPolicy.from"
  "networkPolicy.httpFrom" "service.type" "revisionHistoryLimit" "preStopSeconds" "podDisruptionBudget.enabled"
  "podDisruptionBudget.maxUnavailable" "autoscaling.minReplicas" "autoscaling.maxReplicas" "autoscaling.metric"
  "autoscaling.target" "serviceMonitor.interval" "prometheusRule.kubernetes" "prometheusRule.runbookBase"
  "prometheusRule.disabled" "backup.schedule" "backup.maxAgeHours" "backup.keep" "backup.namespaces" "backup.tokenKey"
  "backup.deadlineSeconds" "backup.serviceAccount.create" "serviceAccount.create" "test.enabled" }}
{{- range $path := concat $sections $values }}
{{- $value := $.Values }}
{{- range splitList "." $path }}
{{- $value = hasKey ($value | default dict) . | ternary (get ($value | default dict) .) nil }}
{{- end }}
{{- $said := and (has $path $values) (has (regexReplaceAll "[.][^.]*$" $path "") $missing) }}
{{- if and (kindIs "invalid" $value) (not $said) }}
{{- $missing = append $missing $path }}
{{- end }}
{{- end }}
{{- if $missing }}
{{- printf "%s: nothing is given. Either a section of your values is empty or a value is null, which removes the defaults: leave it out. Or these are the defaults of an older chart, which --reuse-values keeps: pass your own values with --values FILE, or use --reset-then-reuse-values. Read the upgrade notes in docs/kubernetes.md first" (join ", " $missing) | include "histospec.problem" }}
{{- end }}
{{- end }}

{{- /* A Service's name is the strictest. */}}
{{- define "histospec.checkName" -}}
{{- $name := include "histospec.fullname" . }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- $from := .Values.fullnameOverride | empty | ternary "the release's name, with nameOverride," "fullnameOverride" }}
{{- printf "%s gives the objects the name %s; it must begin with a small letter, and have only small letters, digits and hyphens: set fullnameOverride to such a name" $from $name | include "histospec.problem" }}
{{- end }}
{{- end }}

{{- define "histospec.checkAccess" -}}
{{- $v := .Values }}
{{- if and (not (include "histospec.guarded" .)) (not $v.security.insecure) }}
{{- include "histospec.problem" "tokens.create is false, so any caller could read and write every history: set tokens.existingSecret or tls.clientCA.existingSecret, or set security.insecure to true to allow it" }}
{{- end }}
{{- $callers := list }}
{{- range $v.tokens.callers }}
{{- if has .name $callers }}
{{- printf "tokens.callers: the name %s appears twice; to replace a token, change its rotation" .name | include "histospec.problem" }}
{{- end }}
{{- $callers = append $callers .name }}
{{- end }}
{{- if and $callers (not (include "histospec.makesTokens" .)) }}
{{- include "histospec.problem" "tokens.callers: the chart makes no tokens here; put these callers into the file of tokens.existingSecret (docs/security.md), or set tokens.create to true, and leave tokens.existingSecret empty and security.insecure false" }}
{{- end }}
{{- $tls := include "histospec.tlsSecret" . }}
{{- if and $v.tls.certManager.enabled $v.tls.existingSecret }}
{{- include "histospec.problem" "tls.existingSecret and tls.certManager.enabled: set only one of them" }}
{{- end }}
{{- if and $v.tls.certManager.enabled (not $v.tls.certManager.issuerRef.name) }}
{{- include "histospec.problem" "tls.certManager.enabled needs an issuer: set tls.certManager.issuerRef.name" }}
{{- end }}
{{- if and $v.tls.clientCA.existingSecret (not $tls) }}
{{- include "histospec.problem" "tls.clientCA.existingSecret: client certificates need TLS; set tls.existingSecret or tls.certManager, too" }}
{{- end }}
{{- if ne $v.service.type "ClusterIP" }}
{{- if not (include "histospec.guarded" .) }}
{{- printf "service.type %s publishes the shards beyond the cluster: set security.insecure to false, and set tokens.create, tokens.existingSecret or tls.clientCA.existingSecret" $v.service.type | include "histospec.problem" }}
{{- end }}
{{- if not $tls }}
{{- printf "service.type %s publishes the shards beyond the cluster, where tokens and responses need TLS: set tls.existingSecret or tls.certManager" $v.service.type | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Kubernetes keeps one of two variables of a name, and refuses both with server-side apply. */}}
{{- define "histospec.checkEnvironment" -}}
{{- $names := list "HISTOSPEC_SHARD_NAME" "MALLOC_TRIM_THRESHOLD_" "MALLOC_MMAP_THRESHOLD_" "MALLOC_TOP_PAD_" }}
{{- range .Values.extraEnv }}
{{- if has .name $names }}
{{- printf "extraEnv: the variable %s is there twice, or the chart sets it" .name | include "histospec.problem" }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- $names = list }}
{{- range .Values.backup.extraEnv }}
{{- if has .name $names }}
{{- printf "backup.extraEnv: the variable %s is there twice" .name | include "histospec.problem" }}
{{- end }}
{{- $names = append $names .name }}
{{- end }}
{{- end }}

{{- define "histospec.checkStore" -}}
{{- $v := .Values }}
{{- if contains "@" $v.store.url }}
{{- include "histospec.problem" "store.url is stored in a ConfigMap and must not contain a user or a password: put the URL into a Secret, and name it in store.existingSecret" }}
{{- end }}
{{- if and (eq $v.store.kind "redis") (not $v.store.url) (not $v.store.existingSecret) }}
{{- include "histospec.problem" "store.kind redis needs a URL: set store.url or store.existingSecret" }}
{{- end }}
{{- if and $v.store.url $v.store.existingSecret }}
{{- include "histospec.problem" "store.url and store.existingSecret: set only one of them" }}
{{- end }}
{{- if and (eq $v.store.kind "sqlite") (or $v.store.url $v.store.existingSecret) }}
{{- include "histospec.problem" "store.url and store.existingSecret need store.kind redis, but it is sqlite" }}
{{- end }}
{{- end }}

{{- define "histospec.checkScaling" -}}
{{- $v := .Values }}
{{- if $v.autoscaling.enabled }}
{{- if ne $v.mode "statefulset" }}
{{- include "histospec.problem" "autoscaling.enabled: mode daemonset always has one shard per node" }}
{{- end }}
{{- if ne $v.store.kind "redis" }}
{{- include "histospec.problem" "autoscaling.enabled needs store.kind redis: with sqlite, problems that move to another shard lose their history" }}
{{- end }}
{{- if lt (int $v.autoscaling.maxReplicas) (int $v.autoscaling.minReplicas) }}
{{- include "histospec.problem" "autoscaling.maxReplicas is less than autoscaling.minReplicas" }}
{{- end }}
{{- if and (eq $v.autoscaling.metric "load") (gt (float64 $v.autoscaling.target) 1.0) }}
{{- printf "autoscaling.target is %v; for metric load it must be at most 1, which is a thread that is always busy" $v.autoscaling.target | include "histospec.problem" }}
{{- end }}
{{- if and (eq $v.autoscaling.metric "cpu") (le (float64 $v.autoscaling.target) 1.0) }}
{{- printf "autoscaling.target is %v; for metric cpu it is a percentage of resources.requests.cpu, such as 70" $v.autoscaling.target | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Kubernetes kills what has not ended within the grace period. */}}
{{- define "histospec.checkEnding" -}}
{{- $given := int .Values.terminationGracePeriodSeconds }}
{{- $needs := include "histospec.endSeconds" . }}
{{- if and $given (lt $given (int $needs)) }}
{{- printf "terminationGracePeriodSeconds is %d; must be at least %s (preStopSeconds and options.drain-seconds), or Kubernetes kills shards that still drain. Leave it at 0 for 10 s more than that, or lower options.drain-seconds" $given $needs | include "histospec.problem" }}
{{- end }}
{{- end }}

{{- define "histospec.checkMonitoring" -}}
{{- $rule := .Values.prometheusRule }}
{{- if $rule.enabled }}
{{- if not (or .Values.serviceMonitor.enabled $rule.job) }}
{{- include "histospec.problem" "prometheusRule.enabled: the rules select the label job, which serviceMonitor sets: set serviceMonitor.enabled to true, or prometheusRule.job to the value that your scrape configuration gives the shards" }}
{{- end }}
{{- $known := list }}
{{- range list (include "histospec.rules" .) (include "histospec.kubernetesRules" .) }}
{{- range (. | fromYaml).groups | first | dig "rules" list }}{{ $known = append $known .alert }}{{ end }}
{{- end }}
{{- range $rule.disabled }}
{{- if not (has . $known) }}
{{- printf "prometheusRule.disabled: unknown alert %s; docs/runbooks.md lists the alerts" . | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "histospec.checkBackup" -}}
{{- $v := .Values }}
{{- if $v.backup.enabled }}
{{- $to := $v.backup.destination }}
{{- if and $to.persistentVolumeClaim $to.url }}
{{- include "histospec.problem" "backup.destination.persistentVolumeClaim and backup.destination.url: set only one of them" }}
{{- end }}
{{- if not (or $to.persistentVolumeClaim $to.url) }}
{{- include "histospec.problem" "backup.enabled needs a destination: set backup.destination.persistentVolumeClaim or backup.destination.url" }}
{{- end }}
{{- if and $to.existingSecret (not $to.url) }}
{{- include "histospec.problem" "backup.destination.existingSecret holds credentials for backup.destination.url: set that, too" }}
{{- end }}
{{- if and (eq $v.mode "daemonset") (eq $v.store.kind "sqlite") }}
{{- include "histospec.problem" "backup.enabled: in mode daemonset with store.kind sqlite, no address reaches all shards; use store.kind redis, or back up each node's folder" }}
{{- end }}
{{- if and $v.tokens.existingSecret (not $v.backup.tokenSecret) }}
{{- include "histospec.problem" "backup.enabled: with tokens.existingSecret, set backup.tokenSecret to a Secret that holds a token with the right to admin, and backup.tokenKey to its key" }}
{{- end }}
{{- if and $v.tls.clientCA.existingSecret (not $v.backup.tlsSecret) }}
{{- include "histospec.problem" "backup.enabled: the shards ask for client certificates (tls.clientCA); set backup.tlsSecret to a Secret with ca.crt, tls.crt and tls.key" }}
{{- end }}
{{- end }}
{{- end }}
