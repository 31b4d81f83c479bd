#!/usr/bin/env bash
# Builds etcd and kube-apiserver from Go modules into DIRECTORY/control-plane-HASH, unless they exist, and prints that
# directory. Requires Go; takes about 12 CPU-minutes for each version in modules/*/go.mod. A second process waits for the
# first.
#   tests/apiserver/build.sh DIRECTORY
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
directory=$(cd "$1" && pwd)/control-plane-$(cat "$here"/modules/*/go.mod | sha256sum | cut -c1-12)

exec 9>"$directory.lock"
flock 9
if [[ ! -x "$directory/etcd" || ! -x "$directory/kube-apiserver" ]]; then
  command -v go >/dev/null || { echo "go is not on the path" >&2; exit 1; }
  echo "building etcd and kube-apiserver into $directory: about 12 CPU-minutes, once" >&2
  mkdir -p "$directory"
  export CGO_ENABLED=0 GOFLAGS="-mod=readonly -buildvcs=false"
  cd "$here/modules/etcd"
  go build -o "$directory/etcd.new" go.etcd.io/etcd/server/v3
  cd "$here/modules/apiserver"
  version=$(go list -m -f '{{.Version}}' k8s.io/kubernetes)
  IFS=. read -r major minor _ <<<"${version#v}"
  flags=
  for package in k8s.io/component-base/version k8s.io/client-go/pkg/version; do
    flags+=" -X $package.gitVersion=$version -X $package.gitMajor=$major -X $package.gitMinor=$minor"
    flags+=" -X $package.gitTreeState=clean -X $package.gitCommit=none"
  done
  go build -ldflags "$flags" -o "$directory/kube-apiserver.new" k8s.io/kubernetes/cmd/kube-apiserver
  mv "$directory/etcd.new" "$directory/etcd"
  mv "$directory/kube-apiserver.new" "$directory/kube-apiserver"
fi
echo "$directory"
