{{/* The port of an address such as 0.0.0.0:9002. */}}
{{- define "warmroute.port" -}}
{{- splitList ":" . | last -}}
{{- end -}}

{{/* Where other replicas are served. */}}
{{- define "warmroute.api" -}}
{{- with .Values.config.listeners.api }}{{ include "warmroute.port" .address }}{{ end -}}
{{- end -}}

{{- define "warmroute.xds" -}}
{{- with .Values.config.envoy }}{{ with .xds }}{{ with .address }}{{ include "warmroute.port" . }}{{ end }}{{ end }}{{ end -}}
{{- end -}}
