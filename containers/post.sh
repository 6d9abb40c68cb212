#!/bin/bash
# What %post does: keep the vendor's torch, install the lock around it, say what is inside.
#   post.sh TITLE TORCH COMPAT LABELS
# TORCH is what pip installs where the base brings none; LABELS are words KEY=VALUE.
set -euo pipefail
exec 2>&1
title=$1 torch=$2 compat=$3 labels=$4
atoll=/opt/atoll
locks=$atoll/containers/locks
label_file=${APPTAINER_LABELS:-${SINGULARITY_LABELS:?}}
environment_file=${APPTAINER_ENVIRONMENT:-${SINGULARITY_ENVIRONMENT:?}}
export PYTHONNOUSERSITE=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1

# These are the vendor's, built for its devices: never replaced, not even by the same version.
protected=(torch triton pytorch-triton pytorch-triton-rocm numpy)
state() {
    python3 - "${protected[@]}" <<'PYTHON'
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    spec = importlib.util.find_spec(name.removeprefix("pytorch-").partition("-")[0])
    print(name, version, spec.origin if spec else "")
PYTHON
}
problems() { python3 -m pip check | sort || true; }
stop() {
    printf 'post.sh: %s\n         %s\n' "$1" "$2"
    exit 1
}

# Debian brings Python alone; its torch comes from the package index.
if [[ $torch != none ]]; then
    python3 -m venv "$atoll/venv"
    PATH=$atoll/venv/bin:$PATH
    python3 -m pip install -qq --require-hashes --no-deps -r "$locks/build.txt"
    read -ra words <<< "$torch" # a requirement, and where pip finds it
    python3 -m pip install -qq "${words[@]}"
fi
before=$(state)
[[ $before == *torch* ]] || stop "the base of $title has no torch" "choose a base that has one"
problems > /tmp/problems.txt
mkdir -p $atoll/sbom
python3 -m pip freeze > $atoll/sbom/vendor.txt

kept=" $(cut -d ' ' -f 1 <<< "$before" | tr '\n' ' ')"
awk -v kept="$kept" '/^[A-Za-z0-9]/ { split($1, part, "=="); drop = index(kept, " " part[1] " ") }
    !drop' "$locks/image.txt" > /tmp/lock.txt
PIP_CONSTRAINT='' python3 -m pip install -qq --require-hashes --no-deps --no-build-isolation \
    -r /tmp/lock.txt
PIP_CONSTRAINT='' python3 -m pip install -qq --no-deps --no-build-isolation --editable $atoll
# an image is read-only: without this every rank would compile our modules at every start
python3 -m compileall -q --invalidation-mode unchecked-hash $atoll/src

replaced=$(comm -23 <(printf '%s\n' "$before" | sort) <(state | sort))
[[ -z $replaced ]] || stop "the lock replaced the base's $replaced" "take that out of image.txt"
new=$(problems | python3 $atoll/containers/pip_check.py /tmp/problems.txt "$locks/image.txt")
[[ -z $new ]] || stop "the lock does not fit this base: $new" "another base, or make lock"

# A virtual environment made from this image must see its packages.
site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'export PYTHONPATH=%q\n' "$site" >> "$environment_file"
if [[ $compat == yes ]]; then
    libraries=$(find /usr/local/cuda*/compat -name 'libcuda.so.1' -printf '%h\n' | head -n 1)
    [[ -n $libraries ]] || stop "the base has no cuda-compat" "choose one that has it"
    # shellcheck disable=SC2016 # expanded in the container
    printf 'export LD_LIBRARY_PATH=%q:"$LD_LIBRARY_PATH"\n' "$libraries" >> "$environment_file"
fi

python3 $atoll/containers/sbom.py "$title" "$locks/image.txt" > $atoll/sbom/sbom.cdx.json
{
    printf '%s\n' "$labels" | tr ' ' '\n' | sed 's/=/ /'
    python3 $atoll/containers/sbom.py --labels
    printf 'atoll.sbom %s\n' "$(sha256sum < $atoll/sbom/sbom.cdx.json | cut -d ' ' -f 1)"
    printf 'atoll.cuda.compat %s\n' "$compat"
} >> "$label_file"
rm -rf /tmp/lock.txt /tmp/problems.txt /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
