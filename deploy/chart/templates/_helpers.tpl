{{/* Prefix of all names. */}}
{{- define "warmroute.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels of an object. Argument: a list of the context, the value of the label app, and the component. */}}
{{- define "warmroute.labels" -}}
{{- $ := index . 0 -}}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
app.kubernetes.io/version: {{ $.Values.image.tag | default $.Chart.AppVersion | trunc 63 | quote }}
{{ include "warmroute.podLabels" . }}
{{- end -}}

{{/* Labels of a pod, with the same argument. They contain no version, because a new version would replace the pods. */}}
{{- define "warmroute.podLabels" -}}
{{- $ := index . 0 -}}
app: {{ index . 1 }}
app.kubernetes.io/name: {{ $.Chart.Name }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 2 }}
{{- end -}}

{{/* Labels that select pods, with the same argument. The network policies select `app` only, so that the pod of `helm test` has the same rights. */}}
{{- define "warmroute.selectorLabels" -}}
app: {{ index . 1 }}
app.kubernetes.io/component: {{ index . 2 }}
{{- end -}}

{{- define "warmroute.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "warmroute.fullname" .) -}}
{{- end -}}

{{- define "warmroute.image" -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
{{- end -}}

{{/* The configuration as YAML. With nats.enabled, the replicas share their bookings through the NATS server of the release. */}}
{{- define "warmroute.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- if .Values.nats.enabled -}}
{{- if $config.replicas -}}
{{- fail "nats.enabled sets config.replicas: set only one of them" -}}
{{- end -}}
{{- $server := printf "nats://%s-nats:4222" (include "warmroute.fullname" .) -}}
{{- $_ := set $config "replicas" (dict "nats" (dict "servers" (list $server))) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The part of the configuration that warmroute reads only at startup. crates/server/src/config/reload.rs has the same list. */}}
{{- define "warmroute.startupConfig" -}}
{{- $config := include "warmroute.config" . | fromYaml -}}
{{- range list
  "listeners.ext_proc" "listeners.admin" "listeners.api" "process.pool" "listeners.limits.max_connections"
  "listeners.limits.handshake_timeout" "listeners.limits.max_header_list_size"
  "routing.block_hash" "engines.kv_events" "routing.load.prefill_decay" "queue" "sessions" "replicas" "index.warm_start"
  "index.serve" "index.remote" "index.approximate" "process.readiness" "envoy" "process.log.format" }}
{{- $value := $config -}}
{{- range splitList "." . -}}
{{- if kindIs "map" $value -}}
{{- $value = get $value . -}}
{{- else -}}
{{- $value = "" -}}
{{- end -}}
{{- end }}
{{ . }}: {{ toJson $value }}
{{- end -}}
{{- end -}}

{{/* The port of an address such as 0.0.0.0:9002. */}}
{{- define "warmroute.port" -}}
{{- splitList ":" . | last -}}
{{- end -}}

{{/* Port at which replicas copy the index from one another. */}}
{{- define "warmroute.api" -}}
{{- with .Values.config.listeners.api }}{{ include "warmroute.port" .address }}{{ end -}}
{{- end -}}

{{- define "warmroute.xds" -}}
{{- with .Values.config.envoy }}{{ with .xds }}{{ with .address }}{{ include "warmroute.port" . }}{{ end }}{{ end }}{{ end -}}
{{- end -}}

{{- define "warmroute.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "warmroute.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Containers that download the tokenizers. */}}
{{- define "warmroute.initContainers" -}}
{{- range $at, $model := .Values.tokenizers }}
- name: tokenizer{{ if $at }}-{{ $at }}{{ end }}
  image: {{ $.Values.curlImage }}
  args:
  - --fail
  - --location
  - --silent
  - --show-error
  - --retry
  - "5"
  {{- if $.Values.huggingFace.tokenSecret.name }}
  - --oauth2-bearer # curl does not send it to another host after a redirect
  - $(HF_TOKEN)
  {{- end }}
  - --create-dirs
  - --output-dir
  - /models/{{ $model.directory }}
  - --remote-name-all
  - {{ $model.url }}/{{ "{" }}{{ join "," $model.files }}{{ "}" }}
  {{- with $.Values.huggingFace.tokenSecret.name }}
  env:
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.huggingFace.tokenSecret.key }}}}
  {{- end }}
  securityContext: {{- include "warmroute.securityContext" $ | nindent 4 }}
  resources:
    requests: {cpu: 50m, memory: 32Mi}
    limits: {memory: 64Mi}
  volumeMounts:
  - {name: models, mountPath: /models}
{{- end }}
{{- end -}}

{{- define "warmroute.volumeMounts" -}}
- {name: config, mountPath: /etc/warmroute, readOnly: true}
- {name: models, mountPath: /models, readOnly: true}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "warmroute.volumes" -}}
- name: config
  configMap: {name: {{ include "warmroute.fullname" . }}}
- name: models
  {{- toYaml .Values.models | nindent 2 }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Fields of a pod that decide on which node it runs. */}}
{{- define "warmroute.placement" -}}
{{- with .priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- end -}}
