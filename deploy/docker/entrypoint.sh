#!/bin/sh
# Triton reads and writes compiled kernels in one directory. With a read-only root file system it is a mount, which is
# empty at first. This links the compiled kernels of the image into it.
set -eu
mkdir -p "$TRITON_CACHE_DIR"
cp -Rsf /opt/flashpoint/compiled/. "$TRITON_CACHE_DIR"
exec "$@"
