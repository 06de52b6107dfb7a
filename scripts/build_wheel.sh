#!/bin/bash
# Builds dist/amem-VERSION-py3-none-manylinux_X_Y_x86_64.whl and checks with
# auditwheel that the tag is true.
#
#   scripts/build_wheel.sh
#
# Needs Python 3.9 and Go. The C compiler comes from PyPI (ziglang): it links
# against any glibc's symbols, so no old distribution is needed. All tools are
# pinned in requirements-build.txt and live in build/venv. Two runs of the same
# commit give the same bytes.
set -euo pipefail
umask 022

cd "$(dirname "$0")/.."
root=$PWD
# As old as what PyTorch's own wheels ask for.
glibc=2.28
platform=manylinux_${glibc/./_}_x86_64
python=$root/build/venv/bin/python

[ -x "$python" ] || "${PYTHON:-python3}" -m venv build/venv
"$python" -m pip install --quiet --disable-pip-version-check -r scripts/requirements-build.txt

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || true)}
# The oldest time that a zip archive can hold.
export SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-315532800}
export ZIG_GLOBAL_CACHE_DIR=$root/build/zig-cache

CC="$python -m ziglang cc -target x86_64-linux-gnu.$glibc" CFLAGS=-Werror LDFLAGS=-s \
    scripts/build_native.sh build/wheel

# A clean copy, so that nothing left over from an earlier build gets in.
rm -rf build/stage dist
mkdir -p build/stage dist
cp -R python/. README.md LICENSE build/stage/
rm -rf build/stage/build build/stage/*.egg-info
AMEM_NATIVE_DIR=$root/build/wheel AMEM_WHEEL_PLATFORM=$platform \
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-build-isolation --no-deps \
    --no-cache-dir --wheel-dir dist build/stage

wheel=$(echo dist/amem-*-py3-none-"$platform".whl)
verdict=$("$python" -m auditwheel show "$wheel")
# The tag that the contents allow; it may be older than ours, not newer.
allowed=$(tr '\n' ' ' <<<"$verdict" | sed -n 's/.*consistent with the following platform tag: *"manylinux_2_\([0-9]*\)_x86_64".*/\1/p')
if [ -z "$allowed" ] || [ "$allowed" -gt "${glibc#2.}" ]; then
    echo "$verdict" >&2
    echo "build_wheel: $wheel does not keep what $platform promises" >&2
    exit 1
fi
echo "$wheel (auditwheel: manylinux_2_${allowed}_x86_64)"
