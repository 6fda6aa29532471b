{{- define "ballast.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "ballast.fullname" -}}
{{- $name := .Values.fullnameOverride }}
{{- if not $name }}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name (include "ballast.name" .)) (contains (include "ballast.name" .) .Release.Name) }}
{{- end }}
{{- $name = $name | trunc 53 | trimSuffix "-" }}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) }}
{{- fail (printf "%q cannot name a Service: letters a to z, digits and -, and a letter first. To fix: another fullnameOverride" $name) }}
{{- end }}
{{- $name }}
{{- end }}

{{- define "ballast.selectorLabels" -}}
app.kubernetes.io/name: {{ include "ballast.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "ballast.testLabels" -}}
app.kubernetes.io/name: {{ include "ballast.name" . }}-test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "ballast.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "ballast.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: ballast
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "ballast.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "ballast.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "ballast.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* Security of every container of the chart: nothing but running. */}}
{{- define "ballast.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "ballast.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/* The operator's variables, as a list. */}}
{{- define "ballast.environment" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
# Namespace of the leader's Lease.
- name: BALLAST_NAMESPACE
  valueFrom: {fieldRef: {fieldPath: metadata.namespace}}
{{- with .Values.history }}
{{- if and .enabled .postgresql.secret }}
- name: BALLAST_HISTORY
  valueFrom: {secretKeyRef: {name: {{ .postgresql.secret | quote }}, key: {{ .postgresql.key | quote }}}}
{{- else if .enabled }}
- {name: BALLAST_HISTORY, value: /var/lib/ballast/history.db}
{{- end }}
{{- end }}
{{- if .Values.kueue.enabled }}
- {name: BALLAST_KUEUE, value: "true"}
{{- end }}
# The solver's libraries would start a thread for each core of the node.
- {name: OMP_NUM_THREADS, value: "1"}
{{- range $name, $seconds := .Values.settings }}
- {name: BALLAST_{{ $name }}, value: {{ $seconds | quote }}}
{{- end }}
{{- with include "ballast.trainerTemplate" . }}
- {name: BALLAST_TRAINER_TEMPLATE, value: {{ . | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* A list of strings as the inside of a list in CEL. */}}
{{- define "ballast.celStrings" -}}
{{- range $index, $value := . }}{{ if $index }}, {{ end }}'{{ $value }}'{{ end }}
{{- end }}

{{/* What the operator fills in of the jobs' templates: a PodTemplateSpec as JSON; empty: nothing. */}}
{{- define "ballast.trainerTemplate" -}}
{{- $trainer := dict "name" "trainer" -}}
{{- $spec := dict -}}
{{- with .Values.trainer -}}
{{- with .image }}{{ $_ := set $trainer "image" . }}{{ end -}}
{{- with .resources }}{{ $_ := set $trainer "resources" . }}{{ end -}}
{{- with .imagePullSecrets }}{{ $_ := set $spec "imagePullSecrets" . }}{{ end -}}
{{- $mounts := list -}}
{{- $volumes := list -}}
{{- with .checkpointClaim -}}
{{- $mounts = append $mounts (dict "name" "checkpoints" "mountPath" "/checkpoints") -}}
{{- $volumes = append $volumes (dict "name" "checkpoints" "persistentVolumeClaim" (dict "claimName" .)) -}}
{{- end -}}
{{- if .readOnlyRootFilesystem -}}
{{- $_ := set $trainer "securityContext" (dict "readOnlyRootFilesystem" true) -}}
{{- $mounts = append $mounts (dict "name" "tmp" "mountPath" "/tmp") -}}
{{- $volumes = append $volumes (dict "name" "tmp" "emptyDir" (dict "sizeLimit" .tmpSize)) -}}
{{- end -}}
{{- if $mounts -}}
{{- $_ := set $trainer "volumeMounts" $mounts -}}
{{- $_ := set $spec "volumes" $volumes -}}
{{- end -}}
{{- if .metricsPort -}}
{{- $port := int .metricsPort -}}
{{- $_ := set $trainer "env" (list (dict "name" "BALLAST_METRICS_PORT" "value" (toString $port))) -}}
{{- $_ := set $trainer "ports" (list (dict "name" "metrics" "containerPort" $port)) -}}
{{- end -}}
{{- end -}}
{{- if or $spec (gt (len $trainer) 1) -}}
{{- $_ := set $spec "containers" (list $trainer) -}}
{{- dict "spec" $spec | toJson -}}
{{- end -}}
{{- end -}}
