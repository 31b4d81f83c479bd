#!/bin/sh
# Builds one target with LLVM's coverage counters and runs it on its corpus. On stable Rust, the counters need RUSTC_BOOTSTRAP.
# New inputs are stored in target/corpus, so that the checked-in corpus stays small. Failing inputs are written to target/artifacts.
set -eu
cd "$(dirname "$0")"
target=$1
shift
dir=${CARGO_TARGET_DIR:-target}
host=$(rustc -vV | sed -n 's/^host: //p')
counters="-Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
counters="$counters -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
RUSTC_BOOTSTRAP=1 RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module $counters" \
    cargo build --release --target "$host" --target-dir "$dir" --bin "$target"
mkdir -p "$dir/corpus/$target" "$dir/artifacts/$target"
exec "$dir/$host/release/$target" "-artifact_prefix=$dir/artifacts/$target/" -max_len=4096 -rss_limit_mb=1024 "$@" \
    "$dir/corpus/$target" "corpus/$target"
