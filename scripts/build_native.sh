#!/bin/bash
# Builds the native part of amem.
#
#   scripts/build_native.sh OUTDIR
#
# OUTDIR/lib/libamem_hook.so, OUTDIR/lib/libamem_nccl.so, beside them a library
# of torch_memory_saver's name that depends on the first, OUTDIR/include/amem.h, and for tests and the demonstration OUTDIR/sim/libcuda.so.1 (simulated
# driver) and OUTDIR/sim/libnccl.so.2 (stand-in for NCCL).
#
# Environment: CC (default gcc), GO (default go), and CFLAGS and LDFLAGS, which
# are added for the C libraries.
set -euo pipefail

if [ $# -ne 1 ]; then
    echo "usage: $0 OUTDIR" >&2
    exit 2
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "$0: amem is for Linux on x86_64, this is $(uname -sm)" >&2
    exit 1
fi
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1/lib" "$1/include" "$1/sim"
out=$(cd "$1" && pwd)
cd "$root"

export CC=${CC:-gcc}
# Without -g, or the compiler's paths get into the library.
export CGO_CFLAGS="-O2 -g0"
export CGO_ENABLED=1 GOOS=linux GOARCH=amd64
GO=${GO:-go}

# A library is built beside its place and moved there, so that a process that
# has the old one mapped keeps it.
new=$(mktemp -d "$out/.new.XXXXXX")
trap 'rm -rf "$new"' EXIT

# shared OUTPUT FLAGS SOURCE...
shared() {
    local output=$1 flags=$2 name
    shift 2
    name=$(basename "$output")
    # CC, CFLAGS and LDFLAGS are lists of words. _GNU_SOURCE is empty as in
    # sources that define it themselves, so that the two do not clash.
    # shellcheck disable=SC2086
    $CC -std=c11 -D_GNU_SOURCE= -O2 -fPIC -fvisibility=hidden -pthread -Wall -Wextra ${CFLAGS:-} -shared \
        -Wl,-soname,"$name" -Wl,--as-needed -Wl,-z,defs -Wl,-z,relro $flags ${LDFLAGS:-} \
        -o "$new/$name" "$@" -ldl -lrt -lm
    mv "$new/$name" "$output"
}

# nodelete: NCCL keeps pointers into the hook, so it must outlive a dlclose.
shared "$out/lib/libamem_hook.so" "-Wl,-z,now -Wl,-z,nodelete -Wl,--version-script=$root/golib/hook/exports.map" golib/hook/*.c
shared "$out/lib/torch_memory_saver_hook_mode_preload.abi3.so" \
    "-Wl,-rpath,\$ORIGIN -Wl,--enable-new-dtags -Wl,--no-as-needed $out/lib/libamem_hook.so -Wl,--as-needed" golib/preload/*.c
shared "$out/sim/libcuda.so.1" "" golib/sim/*.c
# lazy: the hook must also find slots that the dynamic linker has not filled yet.
shared "$out/sim/libnccl.so.2" "-Wl,-z,lazy" tests/nccl/*.c
cp golib/hook/amem.h "$out/include/amem.h"

# asyncpreemptoff: the signals of Go's asynchronous preemption would interrupt
# system calls of NCCL. A //go:debug line would be the usual place, but the go
# command refuses this setting there. The link flag replaces the defaults that
# the go command derives from go.mod, so they are repeated.
godebug=$("$GO" list -f '{{.DefaultGODEBUG}}' ./golib/cmd/libamem)
godebug=${godebug:+$godebug,}asyncpreemptoff=1
"$GO" build -buildmode=c-shared -trimpath -buildvcs=false \
    -ldflags "-s -w -buildid= -X=runtime.godebugDefault=$godebug '-extldflags=-Wl,-soname,libamem_nccl.so -Wl,--version-script=$root/golib/cmd/libamem/exports.map ${LDFLAGS:-}'" \
    -o "$new/libamem_nccl.so" ./golib/cmd/libamem
mv "$new/libamem_nccl.so" "$out/lib/libamem_nccl.so"
