#!/bin/sh
# Triton looks for compiled kernels in one directory, and writes others there: on a read-only root that is a mount, empty
# at first. The image's compiled kernels are linked there.
set -eu
mkdir -p "$TRITON_CACHE_DIR"
cp -Rsf /opt/flashpoint/compiled/. "$TRITON_CACHE_DIR"
exec "$@"
