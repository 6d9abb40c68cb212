# What every job of a run does around its commands. launch.sh reads it:
#     source RUN/job.sh RUN SCHEDULER [SECONDS]       SECONDS: after which PBS's time is nearly over
# One job holds the run, hears of its time limit and of faults, and goes on, here or in another one.
# shellcheck shell=bash
run_folder=$1 scheduler=$2 clock_seconds=${3:-}
stop_file=$run_folder/stop restart_file=$run_folder/restart lease_folder=$run_folder/lease
preparing_file=$run_folder/preparing preparation=''
faults_file=$run_folder/faults.jsonl ending_faults='"kind": "(died|stalled|unfit)"'
excluded_file=$run_folder/excluded.json
renew_seconds=10 watch_seconds=60 ending_seconds=25 lease='' fault='' cancelled='' excluded=''

case $scheduler in
    slurm) job=${SLURM_JOB_ID:-0} ;;
    pbs) job=${PBS_JOBID:-${SLURM_JOB_ID:-0}} ;;
    *) job=$$ ;;
esac
# Process ids are compared within one boot and one space of them.
machine=$(cat /proc/sys/kernel/random/boot_id):$(readlink /proc/self/ns/pid)
node=${SLURMD_NODENAME:-$(uname -n)}

# --- The lease: lease/N names the job that holds the run. The highest N holds; to take over is to
# be the one who makes N+1, which any file system gives to one alone. No clock is compared with
# another node's: a lease that nobody renews for watch_seconds is stale.

started() { # PID: when it started, in ticks of the kernel; fails where it is gone
    local stat words
    { stat=$(< "/proc/$1/stat"); } 2> /dev/null || return 1
    read -ra words <<< "${stat##*) }"
    [[ ${words[0]} != Z ]] || return 1
    printf '%s\n' "${words[19]}"
}
newest_lease() {
    local file newest=0
    for file in "$lease_folder"/*; do
        file=${file##*/}
        [[ ! $file =~ ^[0-9]+$ ]] || ((file <= newest)) || newest=$file
    done
    printf '%s\n' "$newest"
}
scheduler_says() { # SCHEDULER JOB: alive, dead or unknown
    local answer code=0
    case $1 in
        slurm) answer=$(squeue --noheader --states=all "--jobs=$2" --format=%T 2>&1) || code=$? ;;
        pbs) answer=$(qstat "$2" 2>&1) || code=$? ;;
        *) answer='' code=1 ;;
    esac
    # a greeting comes before it, and so does a header with letters of its own
    ((code != 0)) || answer=${answer##*$'\n'}
    case $1:$code:$answer in
        pbs:153:* | pbs:35:* | *:*nvalid\ job\ id* | *:*nknown\ [Jj]ob* | *:*has\ finished*) echo dead ;;
        slurm:0:RUNNING | slurm:0:S[UTI]* | slurm:0:RESIZING) echo alive ;;
        slurm:0:COMPLETING | slurm:0:CONFIGURING) echo unknown ;;
        slurm:0:*) echo dead ;; # ended, or waits to be started again
        pbs:0:*\ [RSUE]\ *) echo alive ;;
        pbs:0:*\ [FXCQHW]\ *) echo dead ;;
        *) echo unknown ;;
    esac
}
holder() { # the words of a lease: alive, dead or unknown
    local scheduler_of=${1:-} job_of=${2:-} restarts_of=${3:-} pid=${5:-} start=${6:-} on=${7:-}
    if [[ ${8:-} == ended ]]; then
        echo dead
    elif [[ $on == "$machine" ]]; then
        if [[ $(started "$pid") == "$start" ]]; then echo alive; else echo dead; fi
    elif [[ "$scheduler_of $job_of" == "$scheduler $job" ]]; then
        # this job, started again elsewhere; Slurm counts its starts
        if ((restarts_of < ${SLURM_RESTART_COUNT:-0})); then echo dead; else echo unknown; fi
    else
        scheduler_says "$scheduler_of" "$job_of"
    fi
}
watched() { # LEASE: alive if it is renewed while we look, else dead
    local before waited
    before=$(< "$1") || true
    for ((waited = 0; waited < watch_seconds; waited += 2)); do
        sleep 2
        if [[ $(cat "$1" 2> /dev/null || true) != "$before" ]]; then echo alive && return; fi
    done
    echo dead
}
refuse() { # the words of a lease
    printf 'atoll: run %s is running already: %s job %s on %s holds %s\n' \
        "${run_folder##*/}" "${1:-?}" "${2:-?}" "${4:-?}" "$lease_folder" >&2
    printf '       wait for it or end it, or give this one another name: name=NAME\n' >&2
    printf '%s %s refused\n' "$scheduler" "$job" >> "$run_folder/jobs.txt"
    exit 2
}
read_lease() { # LEASE: its first line as words
    read -ra words <<< "$(head -n 1 "$1" 2> /dev/null || true)"
}
take_lease() { # PID: of the one who renews it
    local number words state next
    mkdir -p "$lease_folder"
    for _ in 1 2 3 4 5; do
        number=$(newest_lease)
        if ((number > 0)); then
            read_lease "$lease_folder/$number"
            state=$(holder "${words[@]}")
            if [[ $state == unknown ]]; then
                state=$(watched "$lease_folder/$number")
                read_lease "$lease_folder/$number"
            fi
            [[ $state != alive ]] || refuse "${words[@]}"
            [[ ${words[7]:-} == ended || ${#words[@]} == 0 ]] ||
                printf 'atoll: %s job %s on %s ended without a word; this job takes the run over\n' \
                    "${words[0]}" "${words[1]}" "${words[3]}"
        fi
        next=$lease_folder/$((number + 1))
        owner="$scheduler $job ${SLURM_RESTART_COUNT:-0} $node $1 $(started "$1") $machine"
        if ! (set -o noclobber && printf '%s\n' "$owner" > "$next") 2> /dev/null; then
            [[ ! -e $next ]] || continue # another one was first
            break
        fi
        if (($(newest_lease) > number + 1)); then rm -f "$next" && continue; fi
        lease=$next # not before: what is in `lease` is ours to end
        for words in "$lease_folder"/[0-9]*; do
            ((${words##*/} > number)) || rm -f "$words"
        done
        return
    done
    printf 'atoll: cannot write %s\n       free some space, or give another place: folders.runs=FOLDER\n' \
        "$lease_folder" >&2
    exit 2
}
write_lease() { # WORDS: whole or not at all
    printf '%s\n' "$1" > "$lease_folder/.$job" && mv -f "$lease_folder/.$job" "$lease"
}
note() { # began or ended: when this job took and left the run
    local now=${EPOCHREALTIME:-$(date +%s)}
    printf '%s %s %s\n' "$1" "${lease##*/}" "${now/,/.}" >> "$run_folder/held.txt" || true
}
end_lease() { # noted first: who sees the lease ended finds the note
    note ended
    write_lease "$owner ended"
}
# Beside the job: renews the lease, and is PBS's clock. It ends with the last process that has its
# pipe, which all processes of the job inherit; so no lease and no clock outlives its job.
keep_lease() {
    trap '' TERM INT HUP USR1 USR2
    local clock_end=$((SECONDS + ${clock_seconds:-0})) word code
    while true; do
        code=0
        read -r -t "$renew_seconds" word || code=$?
        if ((code == 1)) || [[ $word == ended ]]; then break; fi
        if ((code == 0)); then lease=$lease_folder/$word owner=$(head -n 1 "$lease_folder/$word"); fi
        [[ -n ${lease:-} ]] || continue
        if (($(newest_lease) > ${lease##*/})); then
            printf 'atoll: another job has taken the run over; this one ends\n' >&2
            while started "$$" > /dev/null; do # it may be about to start its ranks
                pkill -TERM -P "$$" || true
                kill -TERM "$$" 2> /dev/null || true
                sleep 2
            done
            return
        fi
        write_lease "$owner"$'\n'"renewed $(date +%s)" || true
        if [[ -n $clock_seconds ]] && ((SECONDS >= clock_end)); then
            touch "$stop_file"
            clock_seconds=
        fi
    done
    [[ -z ${lease:-} ]] || end_lease || true
}
# What PBS says to a job is not for its ranks: containers do not see the folder of its node file, and
# its OMP_NUM_THREADS is the number of all cores that it gave, whatever ranks share them.
settle_pbs() {
    unset OMP_NUM_THREADS
    [[ -f ${PBS_NODEFILE:-} ]] || return 0
    local copy=$run_folder/.nodes.$job
    cp "$PBS_NODEFILE" "$copy" && mv -f "$copy" "$run_folder/nodes.txt"
    export PBS_NODEFILE=$run_folder/nodes.txt
}
hold_run() {
    [[ $clock_seconds == '' ]] || ((clock_seconds > renew_seconds)) || renew_seconds=1
    exec {pipe}> >(keep_lease)
    local keeper=$!
    take_lease "$keeper"
    printf '%s\n' "${lease##*/}" >&"$pipe"
    note began
    rm -f "$stop_file" "$restart_file" "$run_folder/failure.txt"
    [[ $scheduler != none ]] || return 0
    # an allocation of a person's lives on behind its run; Slurm and PBS say so of batch jobs alone
    local batch=${ENVIRONMENT:-}${PBS_ENVIRONMENT:-} here=''
    [[ $batch == *BATCH* ]] || here=' here'
    grep -qsE "^$scheduler ${job%%.*}(\.|$| here$)" "$run_folder/jobs.txt" ||
        printf '%s %s%s\n' "$scheduler" "$job" "$here" >> "$run_folder/jobs.txt"
    # the output of a job that was queued by hand is where sbatch was typed
    local output=$run_folder/$scheduler-$job.out typed
    typed=$(readlink "/proc/$$/fd/1") || return 0
    [[ ! -f $typed || -e $output || ${typed%/*} == "$run_folder" ]] || ln -s "$typed" "$output"
}

# --- The time limit. The warning reaches this shell alone: a signal to all processes of the step
# would also end those that hold its image open, and so the ranks; they look for a file instead.

wait_for() {
    trap 'cancelled=yes' TERM # a cancelled job's ranks have heard it too, and save
    local task watcher code=0 known
    known=$(fault_count "$ending_faults")
    "$@" &
    task=$!
    end_launcher "$task" "$known" &
    watcher=$!
    while kill -0 "$task" 2> /dev/null; do wait "$task" || true; done
    wait "$task" || code=$?
    kill "$watcher" 2> /dev/null || true
    trap 'exit 143' TERM
    return "$code"
}
# --- Tokens, where training begins with the first of them (data.window_shards). Whoever prepares is
# polite to the ranks beside it; they read in preparing_file how it stands.

prepare() { # COMMAND
    local task code=0
    nice -n 10 "$@" &
    task=$!
    trap 'kill -TERM "$task" 2> /dev/null || true' TERM
    while kill -0 "$task" 2> /dev/null; do wait "$task" || true; done
    wait "$task" || code=$?
    if ((code == 0)); then rm -f "$preparing_file"; else printf 'failed\n' > "$preparing_file"; fi
}
prepare_beside() { # COMMAND
    printf 'starting\n' > "$preparing_file"
    prepare "$@" &
    preparation=$!
}
end_preparation() { # what is left is for another run
    [[ -n $preparation ]] || return 0
    kill -TERM "$preparation" 2> /dev/null || true
    wait "$preparation" || true
    preparation=''
    rm -f "$preparing_file"
}
note_job() { # OUTPUT of sbatch or qsub: the last line that is a job's id is the next job's
    local line next=
    while read -r line; do
        line=${line#Submitted batch job } line=${line%%;*}
        [[ ! $line =~ ^[0-9]+(\[[0-9]*\])?(\.[A-Za-z0-9._-]+)?$ ]] || next=$line
    done <<< "$1"
    [[ -n $next ]] || return 1
    printf '%s %s\n' "$scheduler" "$next" >> "$run_folder/jobs.txt"
    printf 'atoll: job %s goes on with the run\n' "$next"
}

# --- Faults. Whoever watches the ranks has written down what is wrong, and ended them; where a node
# is gone, the scheduler knows. `atoll go-on` says what follows: the ranks start again on nodes of
# this job that are well, or in another job, or this was the end.

newest_step() { # of the checkpoints that are whole; 0: there is none
    local file step=0
    for file in "$run_folder"/checkpoints/step-*/manifest.json; do
        file=${file%/manifest.json} file=${file##*/step-}
        [[ ! $file =~ ^[0-9]+$ ]] || step=$((10#$file))
    done
    printf '%s\n' "$step"
}
fault_count() { # [PATTERN]
    local count
    count=$(grep -csE "${1:-}" "$faults_file") || true
    printf '%s\n' "${count:-0}"
}
# Beside the ranks: a launcher may wait for the tasks of a node that is gone. What it leaves of its
# step holds nodes that are well, so that the next one has to share them.
end_launcher() { # PID KNOWN
    local since='' id name
    while kill -0 "$1" 2> /dev/null; do
        sleep 2 > /dev/null 2>&1
        (($(fault_count "$ending_faults") > $2)) || continue
        : "${since:=$SECONDS}"
        ((SECONDS - since >= ending_seconds)) || continue
        printf 'atoll: the ranks have not ended %s s after the fault; their launcher is killed\n' \
            "$ending_seconds" >&2
        while read -r id name; do # all but the one of keep_beside
            [[ ! $id =~ ^[0-9]+\.[0-9]+$ || $name == outlive ]] || scancel --signal=KILL "$id" || true
        done < <(squeue --noheader --steps "--jobs=$job" --format='%i %j' 2> /dev/null)
        kill -KILL "$1" || true
        return
    done
}
nodes_of_job() { # with --no-kill a node that went down is no longer among them, also once it is up
    local names
    case $scheduler in
        slurm)
            names=$(squeue --noheader "--jobs=$job" --format=%N 2> /dev/null) || names=''
            scontrol show hostnames "${names:-${SLURM_JOB_NODELIST:-}}" 2> /dev/null || true
            ;;
        pbs) [[ ! -f ${PBS_NODEFILE:-} ]] || awk '!seen[$0]++' "$PBS_NODEFILE" ;;
    esac
}
left_out() { # the nodes of excluded.json, with commas
    [[ -e $excluded_file ]] || return 0
    atoll exclusions "$run_folder" --names | sed -n 's/^@atoll //p' || true
}
place() { # COMMAND: on nodes that are not left out, where the job has more than its step takes
    local word wanted=0 nodes=() good=() bad=''
    step=("$@")
    mapfile -t nodes < <(nodes_of_job)
    for word in "$@"; do [[ $word != --nodes=* ]] || wanted=${word#*=}; done
    excluded=$(left_out)
    for word in "${nodes[@]}"; do
        if [[ ,$excluded, == *,$word,* ]]; then bad+=" $word"; else good+=("$word"); fi
    done
    if [[ -n $outlives ]] && ((${#nodes[@]} > 1)); then keep_beside "${nodes[@]}"; fi
    if [[ $1 == srun ]] && ((${#nodes[@]} > wanted && ${#good[@]} >= wanted)); then
        on_nodes "$(IFS=,; printf '%s' "${good[*]:0:wanted}")" "$@"
    elif [[ -n $bad ]]; then
        printf 'atoll: this job has%s, which excluded.json leaves out, and no other\n' "$bad" >&2
    fi
}
on_nodes() { # NODES srun WORDS
    step=("$2" "--nodelist=$1" "${@:3}")
}
is_ours() { # to go on with: what a person or Slurm ends, or Slurm queues again itself, is not
    [[ -z $cancelled && ! -e $restart_file && ! -s $stop_file ]] && (($(newest_lease) <= ${lease##*/})) || return 1
    [[ $scheduler == slurm ]] || return 0
    local state
    state=$(squeue --noheader "--jobs=$job" --format=%T 2> /dev/null) || return 0
    [[ -z $state || $state == RUNNING ]]
}
go_on() { # BEGAN KNOWN: sets `answer`, the words of atoll go-on
    local words=("--began=$1" "--known-faults=$2" "--job=$job") state
    answer=(end)
    is_ours || return 0
    if [[ -e $stop_file ]]; then
        (($(fault_count) > $2)) || return 0 # the time was over, and nothing else
        words+=(--time-is-over)
    fi
    if [[ $scheduler == slurm ]]; then
        while read -r state; do
            [[ ! $state =~ =(down|fail)|\*$ ]] || words+=("--down=$state")
        done < <(sinfo --noheader --Node "--nodes=${SLURM_JOB_NODELIST:-}" --format=%N=%T \
            2> /dev/null | sort -u)
    fi
    words+=("--nodes=$(nodes_of_job | paste -sd, -)")
    read -ra answer <<< "$(atoll go-on "$run_folder" "${words[@]}" | sed -n 's/^@atoll //p')"
}
# On another node of a job that outlives its nodes (--no-kill): without its first one, which has this
# shell, the job would hold the others until its time is over.
outlive() { # FILE of the lease, NODE of the shell
    local before='' now since=$SECONDS told_to_end=''
    trap 'told_to_end=yes' TERM # no $( ) in this shell: see hear_signals
    while [[ -e $1 ]]; do
        sleep "$((renew_seconds / 2))"
        now=
        { IFS= read -r -d '' now < "$1"; } 2> /dev/null || [[ -n $now ]] || continue
        [[ ${now%%$'\n'*} != *\ ended ]] || return 0
        if [[ -z $told_to_end ]]; then
            if [[ $now != "$before" ]]; then before=$now since=$SECONDS && continue; fi
            ((2 * (SECONDS - since) >= 3 * renew_seconds)) || continue # one is missing: ask Slurm
        fi
        if (leave "$2" "$((SECONDS - since))" "$told_to_end") || [[ -n $told_to_end ]]; then return; fi
    done
}
is_taken_away() { # NODE: Slurm called it down, whatever it calls it now
    local before now
    before=$(scontrol show hostnames "${SLURM_JOB_NODELIST:-}" 2> /dev/null) now=$(nodes_of_job)
    [[ -n $now && $'\n'$before$'\n' == *$'\n'$1$'\n'* && $'\n'$now$'\n' != *$'\n'$1$'\n'* ]]
}
leave() { # NODE of the shell, SECONDS of silence, TOLD_TO_END: fails where the node is there
    local state='' of_job words
    of_job=$(squeue --noheader --states=all "--jobs=$job" --format='%T %r' 2> /dev/null) || true
    [[ -z $3 || $of_job != CANCELLED* ]] || return 0 # by its user
    # the node may be up again: this is what Slurm calls a job whose shell ended with its node
    [[ -z $3 || $of_job != *\ JobLaunchFailure ]] || state=failed
    # a job that ends is shown with the nodes that still do
    [[ $of_job != RUNNING* ]] || ! is_taken_away "$1" || state=down
    : "${state:=$(sinfo --noheader --Node "--nodes=$1" --format=%T 2> /dev/null | head -n 1)}"
    # a node that does not answer (*) may be out of reach only
    [[ $state =~ ^(down|fail) || ($state == *\* && $2 -ge $watch_seconds) ]] || return 1
    words=("--began=$began" "--known-faults=$(fault_count)" "--job=$job" "--down=$1=$state")
    words+=("--nodes=$1,$(nodes_of_job | paste -sd, -)" --time-is-over)
    if [[ $(atoll go-on "$run_folder" "${words[@]}") == *"@atoll again"* ]]; then
        excluded=$(left_out)
        # in another job: this one is cancelled, which would take one that waits again with it
        # shellcheck disable=SC2329 # requeue calls it
        (scontrol() { [[ $1 != requeue ]] && command scontrol "$@"; }; requeue) || true
    fi
    scancel "$job"
}
keep_beside() { # NODES of the job
    local names=(run_folder scheduler job faults_file excluded_file renew_seconds watch_seconds)
    local other=${*: -1}
    local functions=(outlive leave is_taken_away fault_count nodes_of_job left_out note_job requeue atoll) began
    began=$(newest_step)
    [[ $other != "$node" ]] || other=$1
    (
        unset "${!SLURM_GPUS@}" "${!SLURM_NTASKS@}" "${!SLURM_TRES@}"
        exec srun --overlap --nodes=1 --ntasks=1 --mem=0 --gres=none "--nodelist=$other" --output=none \
            --job-name=outlive bash -c "$(declare -f "${functions[@]}")"$'\n'"$(declare -p "${names[@]}" began)"$'\noutlive "$@"' \
            outlive "$lease" "$node"
    ) > /dev/null 2>&1 {pipe}>&- &
}
run_ranks() { # [--outlives] COMMAND: again after a fault, as long as that leads on
    local outlives=''
    if [[ $1 == --outlives ]]; then outlives=yes && shift; fi
    local step answer began known code
    place "$@"
    while true; do
        began=$(newest_step) known=$(fault_count) code=0
        wait_for "${step[@]}" || code=$?
        ((code != 0)) || return 0
        go_on "$began" "$known"
        [[ ${answer[0]:-} == again ]] || return "$code"
        if [[ ${answer[1]} == - ]]; then
            fault=yes
            touch "$restart_file"
            return "$code"
        fi
        if [[ $1 == srun ]]; then on_nodes "${answer[1]}" srun --overlap "${@:2}"; fi
    done
}

# --- The end. A launcher has its own idea of an exit code when some of its tasks end before others,
# so the ranks say by a file that their state is saved and the run should go on.

queue_again() {
    if [[ -z $fault ]]; then
        printf 'atoll: the time of job %s is nearly over; the run goes on in the next one\n' "$job"
        code=@REQUEUED_CODE@
    fi
    excluded=$(left_out)
    [[ -z $excluded || $scheduler == slurm ]] ||
        printf 'atoll: %s takes no list of nodes to leave out: the next job may have %s again\n' \
            "$scheduler" "$excluded" >&2
    if requeue; then
        rm -f "$restart_file"
    else
        printf 'atoll: the run could not be queued again\n       type the same line again\n' >&2
        code=1
    fi
}
at_end() {
    local code=$?
    [[ ! -s $stop_file ]] || trap '' TERM # Ctrl-C, which may be typed once more
    end_preparation
    if [[ -n ${lease:-} ]] && (($(newest_lease) <= ${lease##*/})); then
        end_lease || true
        (printf 'ended\n' >&"$pipe") 2> /dev/null || true # it may be gone
        if [[ -s $stop_file && ($code != 0 || -e $restart_file) ]]; then # by Ctrl-C
            rm -f "$restart_file"
            code=130
        fi
        [[ ! -e $restart_file || $scheduler == none ]] || queue_again
    fi
    [[ $code != 130 || ($scheduler != none && ! -s $stop_file) ]] ||
        printf 'atoll: stopped, step %s is saved; this goes on: bash %q\n' \
            "$(newest_step)" "$run_folder/launch.sh" >&2
    exit "$code"
}
is_held_here() { # the stop file of another job's run is not ours to write
    local file words=()
    for file in "$lease_folder"/[0-9]*; do
        { read -ra words < "$file"; } 2> /dev/null || continue
        [[ "${words[*]:0:2} ${words[7]:-}" != "$scheduler $job " ]] || return 0
    done
    return 1
}
hear_ctrl_c() { # PID of the worker: its end at once where it is typed again
    if is_held_here && [[ ! -s $stop_file ]]; then
        printf 'Ctrl-C\n' > "$stop_file"
        printf 'atoll: the ranks save their state and end; Ctrl-C again ends them at once\n' >&2
        return
    fi
    kill -TERM "$1" 2> /dev/null || true # first: its end is not to be interrupted
    pkill -TERM -P "$1" || true
}
# Bash 5.2 ends with a syntax error where a signal that has a trap arrives while it expands $( ). So
# the shell of a job hears signals and does nothing else; another one does the work. That one and all
# below it are deaf to Ctrl-C, as what a shell starts in the background is: the ranks of an allocation
# hear of it by the stop file, which then holds a word.
hear_signals() {
    local worker code=0
    trap 'trap "" USR2; touch "$stop_file"' USR2 # once is enough
    ATOLL_HEARS=$$ bash "$0" <&0 &
    worker=$!
    trap 'kill -TERM "$worker" 2> /dev/null || true' TERM
    trap 'hear_ctrl_c "$worker"' INT
    while kill -0 "$worker" 2> /dev/null; do wait "$worker" || true; done
    wait "$worker" || code=$?
    exit "$code"
}
if [[ $scheduler == none ]]; then
    trap 'exit 130' INT
elif [[ ${ATOLL_HEARS:-} != "$PPID" ]]; then
    hear_signals
else
    unset ATOLL_HEARS
    trap 'exit 143' TERM
fi
trap at_end EXIT
hold_run
[[ $scheduler != pbs ]] || settle_pbs
