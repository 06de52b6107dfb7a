#!/bin/bash
# Builds the libraries with Go's race detector in the core, for tests:
#
#   scripts/build_race.sh LIBDIR OUTDIR
#
# LIBDIR has libamem_hook.so; OUTDIR gets it too, and libamem_nccl.so. Set
# AMEM_LIBRARY_DIR=OUTDIR and GORACE=halt_on_error=1, so that a race ends the
# process with status 66 and a report on stderr.
set -euo pipefail

if [ $# -ne 2 ]; then
    echo "usage: $0 LIBDIR OUTDIR" >&2
    exit 2
fi
mkdir -p "$2"
lib=$(cd "$1" && pwd)
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.."

# The race detector keeps its shadow memory for addresses below 0xc000000000
# only, so the library asks for one: the dynamic linker takes the address of
# its first segment as a wish.
base=0x7000000000

export CGO_ENABLED=1 CGO_CFLAGS="-O2 -g"
new=$(mktemp -d "$out/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT
"${GO:-go}" build -race -buildmode=c-shared -buildvcs=false \
    -ldflags "-X=runtime.godebugDefault=asyncpreemptoff=1 '-extldflags=-Wl,-Ttext-segment=$base -Wl,-soname,libamem_nccl.so -Wl,--version-script=$PWD/golib/cmd/libamem/exports.map'" \
    -o "$new/libamem_nccl.so" ./golib/cmd/libamem
mv "$new/libamem_nccl.so" "$out/libamem_nccl.so"
for name in libamem_hook.so torch_memory_saver_hook_mode_preload.abi3.so; do
    cp "$lib/$name" "$new/"
    mv "$new/$name" "$out/$name"
done
