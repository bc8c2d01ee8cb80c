{{- define "cleanslate.labels" -}}
app.kubernetes.io/name: cleanslate
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "cleanslate.operatorSelector" -}}
app.kubernetes.io/name: cleanslate
app.kubernetes.io/component: operator
{{- end }}

{{/* The full name of an image. Takes a list: the root, and the image's values. */}}
{{- define "cleanslate.image" -}}
{{- $root := index . 0 }}{{ $image := index . 1 }}
{{- with $root.Values.imageRegistry }}{{ trimSuffix "/" . }}/{{ end }}
{{- $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $image.tag | default $root.Chart.AppVersion }}{{ end }}
{{- end }}

{{/* Requests and limits as JSON, with each amount a string: the operator takes no `cpu: 1`. */}}
{{- define "cleanslate.amounts" -}}
{{- $texts := dict }}
{{- range $kind, $amounts := . }}
{{- $of := dict }}
{{- range $name, $amount := $amounts }}{{ $of = set $of $name (toString $amount) }}{{ end }}
{{- $texts = set $texts $kind $of }}
{{- end }}
{{- toJson $texts }}
{{- end }}

{{/* A binding to the operator's ServiceAccount. Takes a dictionary: root, name, namespace (of a Role; without: a ClusterRole). */}}
{{- define "cleanslate.binding" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: {{ if .namespace }}RoleBinding{{ else }}ClusterRoleBinding{{ end }}
metadata:
  name: {{ .name }}
  {{- with .namespace }}
  namespace: {{ . | quote }}
  {{- end }}
  labels:
    {{- include "cleanslate.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ if .namespace }}Role{{ else }}ClusterRole{{ end }}
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: cleanslate-operator
    namespace: {{ .root.Values.namespaces.operator | quote }}
{{- end }}

{{/* Allows pods of a `system-` priority class in a namespace. Takes a dictionary: root, namespace, class. */}}
{{- define "cleanslate.quota" -}}
apiVersion: v1
kind: ResourceQuota
metadata:
  name: cleanslate-critical-pods
  namespace: {{ .namespace | quote }}
  labels:
    {{- include "cleanslate.labels" .root | nindent 4 }}
spec:
  hard:
    pods: {{ .root.Values.quota.pods | int | quote }}
  scopeSelector:
    matchExpressions:
      - scopeName: PriorityClass
        operator: In
        values: [{{ .class | quote }}]
{{- end }}
