{{/* The port of an address such as 0.0.0.0:9002. */}}
{{- define "warmroute.port" -}}
{{- splitList ":" . | last -}}
{{- end -}}

{{- define "warmroute.xds" -}}
{{- with .Values.config.envoy }}{{ with .xds }}{{ with .listen }}{{ include "warmroute.port" . }}{{ end }}{{ end }}{{ end -}}
{{- end -}}
