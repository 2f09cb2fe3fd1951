{{- define "sluice.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "sluice.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "sluice.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "sluice.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "sluice.selector" -}}
app.kubernetes.io/name: {{ include "sluice.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sluice.labels" -}}
{{ include "sluice.selector" . }}
app.kubernetes.io/component: router
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "sluice.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "sluice.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "sluice.secret" -}}
{{- if .Values.secret.existing -}}
{{- .Values.secret.existing -}}
{{- else if or .Values.secret.adminToken .Values.secret.engineKey -}}
{{- include "sluice.fullname" . -}}
{{- end -}}
{{- end -}}

{{- define "sluice.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /* The configuration file: config, and what the chart decides. */ -}}
{{- define "sluice.config" -}}
{{- if or (hasKey .Values.config "listen") (hasKey .Values.config "kube") -}}
{{- fail "config.listen and config.kube are set by containerPort and discovery" -}}
{{- end -}}
{{- $own := dict "listen" (printf "0.0.0.0:%d" (int .Values.containerPort)) "admin" (dict "listen" (printf "127.0.0.1:%d" (int .Values.admin.port))) -}}
{{- if .Values.tls.secretName -}}
{{- $_ := set $own "tls" (dict "cert" "/etc/sluice-tls/tls.crt" "key" "/etc/sluice-tls/tls.key") -}}
{{- end -}}
{{- if .Values.discovery.enabled -}}
{{- $port := .Values.discovery.port -}}
{{- if not (kindIs "string" $port) -}}{{- $port = int $port -}}{{- end -}}
{{- $kube := dict "selector" .Values.discovery.selector "role_label" .Values.discovery.roleLabel "port" $port -}}
{{- with .Values.discovery.namespace -}}{{- $_ := set $kube "namespace" . -}}{{- end -}}
{{- with .Values.discovery.worker -}}{{- $_ := set $kube "worker" . -}}{{- end -}}
{{- $_ := set $own "kube" $kube -}}
{{- else if not .Values.config.workers -}}
{{- if not (or .Values.config.discovery .Values.config.registration) -}}
{{- fail "no engines: set discovery.enabled, or workers, discovery or registration of config" -}}
{{- end -}}
{{- end -}}
{{- toYaml (mergeOverwrite (deepCopy .Values.config) $own) -}}
{{- end -}}
