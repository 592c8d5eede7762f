#!/usr/bin/env bash
# The quickstart from nothing: a Slurm on this machine, one run on it, and what came of it.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
run="runs/quickstart-$(date +%Y%m%d-%H%M%S)"

slime-hpc devcluster up
eval "$(slime-hpc devcluster env)"
python -m slime_hpc.testing.tiny_model examples/quickstart/model
slime-hpc submit examples/quickstart/profile.yaml --set "run_dir=$PWD/$run" --watch
slime-hpc report "$run"

cat <<EOF

The local Slurm is still up. To go on with it in this shell:
  export PATH="$PWD/.venv/bin:\$PATH"; eval "\$(slime-hpc devcluster env)"
To end it: .venv/bin/slime-hpc devcluster down
EOF
