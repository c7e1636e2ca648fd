{{- /* Checks of what an upgrade would do to existing shards and their histories. `lookup` finds them only if Helm can ask the
cluster: `helm template` does not ask, and `helm rollback` renders nothing. */}}
{{- define "histospec.checkExisting" -}}
{{- include "histospec.checkTokens" . }}
{{- include "histospec.checkNames" . }}
{{- $live := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "histospec.fullname" .) }}
{{- $with := dict "root" . "live" $live }}
{{- if ne .Values.mode "statefulset" }}
{{- include "histospec.checkMode" $with }}
{{- else }}
{{- if $live }}
{{- include "histospec.checkClaims" $with }}
{{- include "histospec.checkRevisions" $with }}
{{- end }}
{{- if eq .Values.store.kind "sqlite" }}
{{- include "histospec.checkScaleDown" $with }}
{{- end }}
{{- end }}
{{- end }}

{{- define "histospec.checkTokens" -}}
{{- $name := include "histospec.tokensSecret" . }}
{{- if include "histospec.makesTokens" . }}
{{- with lookup "v1" "Secret" .Release.Namespace $name }}
{{- if not (hasKey (.data | default dict) "tokens.toml") }}
{{- printf "Secret %s exists without a key tokens.toml: delete it, so that the chart creates a new one, or name your own in tokens.existingSecret" $name | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- range .Values.tokens.callers }}
{{- $live := lookup "v1" "Secret" $.Release.Namespace (include "histospec.callerSecret" (dict "root" $ "name" .name)) }}
{{- if and (not (dig "previous" true .)) (include "histospec.rotates" (dict "caller" . "live" $live)) }}
{{- printf "tokens.callers: rotation %d gives %s a new token, and previous is false, which would end its present token at once: remove previous and upgrade, give %s the new token, and then set previous to false" (int64 .rotation) .name .name | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Another name is another StatefulSet, with other volumes and tokens; Helm deletes the one before. */}}
{{- define "histospec.checkNames" -}}
{{- $name := include "histospec.fullname" . }}
{{- $selector := include "histospec.selector" . | fromYaml }}
{{- $confirmed := eq (toString .Values.scaleDown.confirmReplicas) "0" }}
{{- range $kind := list "StatefulSet" "DaemonSet" }}
{{- range (lookup "apps/v1" $kind $.Release.Namespace "").items }}
{{- $labels := .metadata.labels | default dict }}
{{- if and (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) (hasPrefix (printf "%s-" $.Chart.Name) (get $labels "helm.sh/chart")) }}
{{- $was := .metadata.name }}
{{- if and (ne $was $name) (not $confirmed) }}
{{- printf "the %s of this release has the name %s, and fullnameOverride, or else nameOverride, now gives %s: Helm would delete it, the new shards would read no volume of it, and the chart would make new tokens. Set fullnameOverride to %s to keep it. Or export the histories first (`histospec snapshot FILE --from ENDPOINT`), import them afterwards (`histospec restore FILE --to ENDPOINT --merge`), and set scaleDown.confirmReplicas to 0, too" $kind $was $name $was | include "histospec.problem" }}
{{- else if and (eq $was $name) (eq (lower $kind) $.Values.mode) (ne (toJson .spec.selector.matchLabels) (toJson $selector)) }}
{{- printf "nameOverride changes the selector of %s %s, which Kubernetes cannot change. Set nameOverride to %s to keep it. Or `kubectl -n %s delete %s %s`, which ends the shards, and upgrade again" $kind $name (index .spec.selector.matchLabels "app.kubernetes.io/name") $.Release.Namespace (lower $kind) $name | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Helm deletes the StatefulSet if the release becomes a DaemonSet. */}}
{{- define "histospec.checkMode" -}}
{{- $live := .live }}
{{- if and $live ($live.spec).volumeClaimTemplates (ne (toString .root.Values.scaleDown.confirmReplicas) "0") }}
{{- $deletes := eq (($live.spec.persistentVolumeClaimRetentionPolicy).whenDeleted | default "Retain") "Delete" }}
{{- printf "mode is daemonset, and the shards of StatefulSet %s have their histories on volumes: Helm would delete the StatefulSet%s, and no shard of a DaemonSet reads its volumes. Export the histories first (`histospec snapshot FILE --from ENDPOINT`), import them afterwards (`histospec restore FILE --to ENDPOINT --merge`): docs/kubernetes.md has the steps under Upgrade. Then set scaleDown.confirmReplicas to 0, too" $live.metadata.name ($deletes | ternary " and its volumes" "") | include "histospec.problem" }}
{{- end }}
{{- end }}

{{- /* The command that deletes a StatefulSet alone. Takes root and live. */}}
{{- define "histospec.orphan" -}}
`kubectl -n {{ .root.Release.Namespace }} delete statefulset {{ .live.metadata.name }} --cascade=orphan`, which leaves the shards running
{{- end }}

{{- define "histospec.checkRevisions" -}}
{{- $had := dig "spec" "revisionHistoryLimit" 10 .live | int64 }}
{{- $wanted := int64 .root.Values.revisionHistoryLimit }}
{{- if ne $had $wanted }}
{{- printf "revisionHistoryLimit is %d, and StatefulSet %s has %d: Kubernetes cannot change that in a StatefulSet. 1. %s. 2. Upgrade again. Or leave it at %d" $wanted .live.metadata.name $had (include "histospec.orphan" .) $had | include "histospec.problem" }}
{{- end }}
{{- end }}

{{- /* Kubernetes cannot change volumeClaimTemplates, and its error says neither why nor what to do. */}}
{{- define "histospec.checkClaims" -}}
{{- $v := .root.Values }}
{{- $name := .live.metadata.name }}
{{- $kubectl := printf "kubectl -n %s" .root.Release.Namespace }}
{{- $orphan := include "histospec.orphan" . }}
{{- $export := "`histospec snapshot FILE --from ENDPOINT`" }}
{{- $import := "`histospec restore FILE --to ENDPOINT --merge`" }}
{{- $docs := "docs/kubernetes.md has the steps under Upgrade" }}
{{- $claims := include "histospec.claims" .root }}
{{- $had := first (.live.spec.volumeClaimTemplates | default (list dict)) }}
{{- if and $had (not $claims) }}
{{- $value := eq $v.store.kind "sqlite" | ternary "persistence.enabled is false" (printf "store.kind is %s" $v.store.kind) }}
{{- printf "%s, and the shards of StatefulSet %s have their histories on volumes: Kubernetes cannot remove the volumes of a StatefulSet, and the new shards would not read them. 1. Export the histories: %s. 2. %s. 3. Upgrade again. 4. Import the histories: %s. %s" $value $name $export $orphan $import $docs | include "histospec.problem" }}
{{- else if and $claims (not $had) }}
{{- /* A new StatefulSet would adopt pods without volumes, and could not add volumes to them. */}}
{{- printf "store.kind is sqlite and persistence.enabled is true, and StatefulSet %s has no volumes: Kubernetes cannot add any. 1. Export the histories: %s. 2. `%s delete statefulset %s`, which ends the shards. 3. Upgrade again. 4. Import the histories: %s. %s" $name $export $kubectl $name $import $docs | include "histospec.problem" }}
{{- else if $claims }}
{{- $size := $had.spec.resources.requests.storage }}
{{- $grows := subf (include "histospec.bytes" $v.persistence.size | float64) (include "histospec.bytes" $size | float64) }}
{{- $class := $had.spec.storageClassName | default "" }}
{{- $changed := list }}
{{- if $grows }}
{{- $changed = append $changed (printf "persistence.size is %v, and the volumes of StatefulSet %s have %v" $v.persistence.size $name $size) }}
{{- end }}
{{- if ne $v.persistence.storageClass $class }}
{{- $changed = append $changed (printf "persistence.storageClass is %q, and the volumes of StatefulSet %s have %q" $v.persistence.storageClass $name $class) }}
{{- end }}
{{- if ne (toJson $v.persistence.accessModes) (toJson $had.spec.accessModes) }}
{{- $changed = append $changed (printf "persistence.accessModes is %s, and the volumes of StatefulSet %s have %s" (toJson $v.persistence.accessModes) $name (toJson $had.spec.accessModes)) }}
{{- end }}
{{- if $changed }}
{{- $patch := printf "1. For each volume of a shard: `%s patch pvc data-%s-0 --patch '{\"spec\":{\"resources\":{\"requests\":{\"storage\":\"%v\"}}}}'`. 2. %s. 3. Upgrade again" $kubectl $name $v.persistence.size $orphan }}
{{- $keep := printf "1. %s. 2. Upgrade again. Existing volumes stay unchanged; added shards get the new kind" $orphan }}
{{- $shrink := "Volumes cannot shrink: leave persistence.size unchanged, or move the histories to new volumes" }}
{{- $steps := lt $grows 0.0 | ternary $shrink (gt $grows 0.0 | ternary $patch $keep) }}
{{- printf "%s: Kubernetes cannot change that in a StatefulSet. %s. %s" (join "; " $changed) $steps $docs | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Each shard has its own history. If no shard runs, the volumes show which shards there were. */}}
{{- define "histospec.checkScaleDown" -}}
{{- $v := .root.Values }}
{{- $now := 0 }}
{{- if .live }}
{{- $now = int .live.spec.replicas }}
{{- end }}
{{- $wanted := int $v.replicas }}
{{- $claims := include "histospec.claims" .root }}
{{- if eq (toString $v.scaleDown.confirmReplicas) (toString $wanted) }}
{{- /* The user has confirmed. */}}
{{- else if $now }}
{{- $kept := and (not (empty $claims)) (eq $v.persistence.retentionPolicy.whenScaled "Retain") }}
{{- /* Stopping all shards loses nothing if the volumes are kept. */}}
{{- $stops := and (eq $wanted 0) $kept }}
{{- if and (lt $wanted $now) (not $stops) }}
{{- printf "replicas is %d, and %d shards run, each with its own history in SQLite: the remaining shards do not have the history of the removed ones%s. Export the histories first (`histospec snapshot FILE --from ENDPOINT`), import them afterwards (`histospec restore FILE --to ENDPOINT --merge`): docs/backup.md has the steps. Then set scaleDown.confirmReplicas to %d, too. Leave replicas at %d to change nothing" $wanted $now ($kept | ternary "" ", which is deleted") $wanted $now | include "histospec.problem" }}
{{- end }}
{{- else if and $wanted $claims }}
{{- $prefix := printf "data-%s-" (include "histospec.fullname" .root) }}
{{- $unread := list }}
{{- $all := 0 }}
{{- range (lookup "v1" "PersistentVolumeClaim" .root.Release.Namespace "").items }}
{{- $ordinal := trimPrefix $prefix .metadata.name }}
{{- if and (regexMatch (printf "^%s[0-9]+$" $prefix) .metadata.name) (not .metadata.deletionTimestamp) }}
{{- if ge (int $ordinal) $wanted }}
{{- $unread = append $unread .metadata.name }}
{{- $all = max $all (add1 (int $ordinal)) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $unread }}
{{- printf "replicas is %d, and volumes of further shards exist (%s), each with its own history in SQLite, which no other shard reads. Set replicas to %d to use all histories, and then scale down as docs/backup.md says; or delete the volumes whose history you do not need; or set scaleDown.confirmReplicas to %d, too, to leave them unread" $wanted (join ", " $unread | trunc 200) $all $wanted | include "histospec.problem" }}
{{- end }}
{{- end }}
{{- end }}
