#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Resolves requirements/*.in into the lock files for Python 3.11 and 3.12 on Linux x86_64.
# Maintainers run it after changing a requirement (needs uv on PATH); `build.sh setup` only reads the result.
# Locked versions stay where they can; `scripts/lock.sh --upgrade` renews them all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
options=("$@")
unset UV_FIND_LINKS # the locks name public builds only

compile() { # compile NAME [uv arguments]: requirements/NAME.in -> requirements/NAME.lock
    local name=$1
    shift
    uv pip compile "requirements/$name.in" --universal --fork-strategy fewest --python-version 3.11 \
        --generate-hashes --no-header --no-annotate --no-emit-index-url --no-emit-find-links --quiet "${options[@]}" "$@" \
        --output-file "requirements/$name.lock"
    # The limits that every line shares are checked by build.sh, once.
    sed -i "s/ ; python_full_version < '3.13' and platform_machine == 'x86_64' and sys_platform == 'linux'//" \
        "requirements/$name.lock"
    # Every index has its own builds of these two, so only their version is locked.
    python3 - "requirements/$name.lock" <<'PY'
import pathlib, re, sys
lock = pathlib.Path(sys.argv[1])
text = re.sub(r"^(torch|torchvision)==([^+\s]+)(?:\+\S+)?(?: \\\n    --hash=\S+)+", r"\1==\2", lock.read_text(), flags=re.M)
lock.write_text(text)
PY
}

cuda_parts=$(mktemp)
trap 'rm -f "$cuda_parts"' EXIT
# Parts of PyPI's CUDA build of torch, which the CPU lock must not name.
for part in bindings pathfinder toolkit; do echo "cuda-$part ; sys_platform == 'never'"; done >"$cuda_parts"
for part in cublas cuda-cupti cuda-nvrtc cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 \
    nccl-cu13 nvjitlink nvshmem-cu13 nvtx; do echo "nvidia-$part ; sys_platform == 'never'"; done >>"$cuda_parts"

compile uv
compile tritonserver --no-deps
compile perf_analyzer --no-deps
compile page
compile clients
compile deploy --no-deps
compile cpu --override requirements/overrides.txt --override requirements/overrides-cpu.txt --override "$cuda_parts"
compile gpu --override requirements/overrides.txt
compile dev --constraint requirements/cpu.lock --constraint requirements/gpu.lock
