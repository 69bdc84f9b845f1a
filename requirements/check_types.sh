#!/bin/sh
# mypy over the package as it is imported: with the two outer folders inside. Usage: check_types.sh PYTHON
set -eu
root=$(pwd)
tree=.build/types/sglang_hicache_ext
rm -rf .build/types
mkdir -p $tree/kernels
for entry in "$root"/sglang_hicache_ext/*; do
    [ "$(basename "$entry")" = kernels ] || ln -s "$entry" $tree/
done
for entry in "$root"/sglang_hicache_ext/kernels/*.py; do
    ln -s "$entry" $tree/kernels/
done
ln -s "$root/storage_backends" $tree/storage_backends
ln -s "$root/kernels/l2_prefetch" $tree/kernels/l2_prefetch
cd .build/types
"$1" -m mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.mypy_cache/types" -p sglang_hicache_ext
