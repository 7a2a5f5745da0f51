# Sourced by the wrappers: where the project is, its environment, and how a command becomes a job step.
# shellcheck shell=bash

# sbatch runs a copy of the script from elsewhere; the project is then where the job was submitted.
project=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [[ -z ${VIRTUAL_ENV:-}${CONDA_PREFIX:-} && -f $project/.venv/bin/activate ]]; then
    # shellcheck source=/dev/null
    source "$project/.venv/bin/activate"
fi

# Run a command to its end. Slurm sends the batch shell alone a signal before the time limit, which `told` is called at.
attended() {
    if [[ -z ${SLURM_JOB_ID:-} || -n ${SLURM_STEP_ID:-} ]]; then
        "$@"
        return
    fi
    local code=0
    trap told USR1 TERM
    "$@" &
    attended_pid=$!
    wait "$attended_pid" || code=$?
    while kill -0 "$attended_pid" 2>/dev/null; do # a signal ended the waiting, not the command
        code=0
        wait "$attended_pid" || code=$?
    done
    trap - USR1 TERM
    return "$code"
}

# Run a command, as a step of the Slurm job when there is one that we are not already a step of. Its exit code is ours.
step() {
    echo "+ $*" >&2
    if [[ -n ${SLURM_JOB_ID:-} && -z ${SLURM_STEP_ID:-} ]] && command -v srun >/dev/null; then
        srun --nodes=1 --ntasks=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --kill-on-bad-exit=1 "$@"
    else
        "$@"
    fi
}
