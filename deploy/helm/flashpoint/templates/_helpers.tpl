{{- define "flashpoint.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "flashpoint.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "flashpoint.labels" -}}
{{ include "flashpoint.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* A setting as the server reads it: Helm has all numbers as floats, and would write 4294967296 as 4.294967296e+09. */ -}}
{{- define "flashpoint.value" -}}
{{- if kindIs "slice" . -}}{{ join "," . }}
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}{{ int64 . }}
{{- else -}}{{ . }}{{- end -}}
{{- end -}}

{{- /* Time that supervisor and engines need to end beyond shutdown_timeout: 15 s for a worker, 1 s for an engine. */ -}}
{{- define "flashpoint.graceSeconds" -}}
{{- add .Values.preStopSeconds (ceil .Values.settings.shutdown_timeout) 20 -}}
{{- end -}}

{{- /* Memory that the settings allow, and that the processes take besides: docs/kubernetes.md has the formula and its reasons. */ -}}
{{- define "flashpoint.memory" -}}
{{- $settings := .Values.settings -}}
{{- $grpc := ternary 0 $settings.grpc_bytes (kindIs "invalid" $settings.grpc_port) -}}
{{- $http := mulf $settings.workers (addf 268435456 (mulf 112 $settings.json_limit)) -}}
{{- $caches := ternary $settings.cache_bytes 0 (eq (int .Values.gpu.count) 0) -}}
{{- $bytes := addf $settings.staging_bytes $settings.queue_bytes $caches $grpc $http -}}
{{- add (int64 (ceil (divf $bytes 1048576))) .Values.memory.processesMiB -}}Mi
{{- end -}}

{{- define "flashpoint.device" -}}
{{- $count := int .Values.gpu.count -}}
{{- if eq $count 0 -}}cpu{{- else if eq $count 1 -}}cuda{{- else -}}all{{- end -}}
{{- end -}}

{{- /* Checks that values.schema.json cannot express: of two values together, or of the chart alone. */ -}}
{{- define "flashpoint.checks" -}}
{{- if not (or .Values.apiKeys.secret .Values.insecure) -}}
{{- fail "apiKeys.secret: empty, so that nobody is asked for a key: name a Secret with keys, or set insecure: true to serve everybody who reaches the Service" -}}
{{- end -}}
{{- if and .Values.apiKeys.fileKey (not .Values.apiKeys.secret) -}}
{{- fail "apiKeys.fileKey: needs apiKeys.secret, without which nobody is asked for a key" -}}
{{- end -}}
{{- if or (hasPrefix "127." .Values.settings.host) (has .Values.settings.host (list "localhost" "::1")) -}}
{{- fail "settings.host: can be reached from within a pod alone" -}}
{{- end -}}
{{- $port := .Values.settings.grpc_port -}}
{{- if and (not (kindIs "invalid" $port)) (not $port) -}}
{{- fail "settings.grpc_port: 0 takes a free port, which a Service cannot name" -}}
{{- end -}}
{{- if has (int $port) (list 8000 (int .Values.service.port)) -}}
{{- fail "settings.grpc_port: is HTTP's, which is 8000 in a pod and service.port at the Service" -}}
{{- end -}}
{{- with .Values.autoscaling -}}
{{- if and (ne .kind "off") (lt (int .maxReplicas) (int .minReplicas)) -}}
{{- fail "autoscaling.maxReplicas: less than autoscaling.minReplicas" -}}
{{- end -}}
{{- end -}}
{{- with .Values.networkPolicy -}}
{{- if and .enabled $.Values.settings.otlp_endpoint (not .egress) -}}
{{- fail "networkPolicy.egress: empty, so that nothing can reach settings.otlp_endpoint" -}}
{{- end -}}
{{- end -}}
{{- end -}}
