#!/usr/bin/env bash
# Builds programs from Go modules into DIRECTORY/GROUP-HASH, unless they exist, and prints that directory. Requires Go.
# Groups: control-plane (etcd and kube-apiserver, about 12 CPU-minutes for each version in modules/*/go.mod) and
# deploy-tools (helm and kustomize, about 4). A second process waits for the first.
#   tests/apiserver/build.sh DIRECTORY control-plane|deploy-tools
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
group=$2
case "$group" in
  control-plane) modules="apiserver etcd" programs="etcd kube-apiserver" ;;
  deploy-tools) modules="helm kustomize" programs="helm kustomize" ;;
  *) echo "unknown group: $group" >&2; exit 1 ;;
esac
hash=$(for module in $modules; do cat "$here/modules/$module/go.mod"; done | sha256sum | cut -c1-12)
mkdir -p "$1"
directory=$(cd "$1" && pwd)/$group-$hash

build() { # PROGRAM MODULE PACKAGE [FLAG..]
  cd "$here/modules/$2"
  go build "${@:4}" -o "$directory/$1.new" "$3"
}

kube_apiserver_flags() {
  cd "$here/modules/apiserver"
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  IFS=. read -r major minor _ <<<"${version#v}"
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    printf ' -X %s' "$package.gitVersion=$version" "$package.gitMajor=$major" "$package.gitMinor=$minor"
    printf ' -X %s' "$package.gitTreeState=clean" "$package.gitCommit=none"
  done
}

exec 9>"$directory.lock"
flock 9
missing=
for program in $programs; do [[ -x "$directory/$program" ]] || missing=1; done
if [[ -n "$missing" ]]; then
  command -v go >/dev/null || { echo "go is not on the path" >&2; exit 1; }
  echo "building $programs into $directory: several CPU-minutes, once" >&2
  mkdir -p "$directory"
  export CGO_ENABLED=0 GOFLAGS="-mod=readonly -buildvcs=false"
  case "$group" in
    control-plane)
      (build etcd etcd go.etcd.io/etcd/server/v3)
      flags=$(kube_apiserver_flags)
      (build kube-apiserver apiserver k8s.io/kubernetes/cmd/kube-apiserver -ldflags "$flags")
      ;;
    deploy-tools)
      (build helm helm helm.sh/helm/v3/cmd/helm)
      (build kustomize kustomize sigs.k8s.io/kustomize/kustomize/v5)
      ;;
  esac
  for program in $programs; do mv "$directory/$program.new" "$directory/$program"; done
fi
echo "$directory"
