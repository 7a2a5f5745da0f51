# Sourced by the wrappers: where the project is, its environment, and how a command becomes a job step.
# shellcheck shell=bash

# sbatch runs a copy of the script from elsewhere; the project is then where the job was submitted.
project=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f $project/.venv/bin/activate ]]; then
    # shellcheck source=/dev/null
    source "$project/.venv/bin/activate"
fi

# Run a command, as a step of the Slurm job when there is one that we are not already a step of. Its exit code is ours.
step() {
    echo "+ $*" >&2
    if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} ]] && command -v srun >/dev/null; then
        srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "$@"
    else
        "$@"
    fi
}
