"""What a person types: the lines at the end of each command's help, and of `atoll --help`."""

from collections.abc import Mapping

FIRST = """\
examples:
  atoll list facilities                                what facility= may be
  atoll submit facility=NAME experiment=demo           train a small model here
  atoll submit --dry-run facility=NAME nodes=8         print the job, queue nothing
  atoll status                                         every run of this folder
"""

# a line, and behind two blanks or more what it does
LINES: Mapping[str, str] = {
    "submit": """\
  sbatch/train.sbatch facility=NAME experiment=demo
  sbatch/train.sbatch facility=NAME model=llama2_7b nodes=8 --dry-run
  sbatch/train.sbatch facility=NAME --then evaluate,report --tasks piqa,arc_easy
  sbatch/train.sbatch facility=NAME --multirun sharding=ddp,full_shard""",
    "compose": """\
  atoll compose facility=NAME model=llama2_7b     each value, and the file it is from
  atoll compose facility=NAME --json""",
    "plan": """\
  atoll plan facility=NAME model=llama2_7b nodes=8
  atoll plan facility=NAME model=llama2_7b sharding=auto --explain
  atoll plan --record                             how far off past predictions were
  atoll plan facility=NAME model=llama2_7b --simulate=nodes=16,64,...,1024
  atoll plan --facilities NAME,OTHER model=llama2_7b nodes=8
  atoll plan --measure facility=NAME              half a minute: what this machine can do""",
    "status": """\
  atoll status
  atoll status NAME --follow""",
    "logs": """\
  atoll logs NAME
  atoll logs NAME --follow""",
    "cancel": """\
  atoll cancel NAME     the same line that started it goes on with it later""",
    "report": """\
  atoll report NAME
  atoll report NAME OTHER --compare
  atoll report NAME --watch     http://localhost:8008, while it trains
  atoll report scaling.json     what atoll plan --simulate --json printed
  atoll report campaigns/NAME --csv""",
    "diff": """\
  atoll diff NAME OTHER""",
    "judge": """\
  atoll judge runs/NAME""",
    "exclusions": """\
  atoll exclusions runs/NAME                     each node, why, and by which evidence
  atoll exclusions runs/NAME --take-back NODE""",
    "evaluate": """\
  atoll evaluate facility=NAME model=from_path model.source=FOLDER data=python_stdlib
  atoll evaluate runs/NAME --tasks piqa,arc_easy     scores, in this process""",
    "generate": """\
  atoll generate runs/NAME --prompt "def main"
  atoll generate FOLDER --chat --prompt "What is a reef?" --max-new-tokens 64""",
    "models": """\
  atoll models
  atoll models qwen3 --json""",
    "verify": """\
  atoll verify runs/NAME/export
  atoll verify FOLDER --from runs/NAME --signers allowed_signers --identity me""",
    "prepare": """\
  atoll prepare --into BUNDLE facility=NAME experiment=llama2_7b_it
  atoll prepare --verify BUNDLE""",
    "init": """\
  atoll init my_models                  then: cd my_models && make demo
  atoll init --update my_models         after an upgrade; files that you changed stay""",
    "list": """\
  atoll list models
  atoll list runs --json""",
    "doctor": """\
  atoll doctor facility=NAME
  atoll doctor facility=NAME nodes=2 --job     its devices and links, in a job""",
    "rehearse": """\
  atoll rehearse facility=NAME     on Slurm nodes of this machine: make help""",
    "image": """\
  atoll image build cpu
  atoll image inspect cpu
  atoll image sign cpu --key private.pem""",
    "federate": """\
  atoll federate --dry-run federation=NAME
  atoll federate federation=NAME
  atoll federate --status federation=NAME""",
    "completion": """\
  source <(atoll completion bash)""",
}


def examples_of(command: str) -> str | None:
    """The end of its help; none of what jobs call."""
    return f"examples:\n{LINES[command]}" if command in LINES else None
