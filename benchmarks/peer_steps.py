"""A small data-parallel training that saves and resumes, as a user of each peer would write it.

    python peer_steps.py torchrun|srun|lightning FOLDER  (submitit starts `Steps` by itself)

Rank 0 appends each step and its time to FOLDER/steps.txt; each rank leaves its pid and node.
PEER_STEPS, PEER_STEP_SECONDS, PEER_TIMEOUT_SECONDS: other lengths than these.
"""

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

SAVED_EVERY = 5
STEPS = int(os.environ.get("PEER_STEPS", "60"))
STEP_SECONDS = float(os.environ.get("PEER_STEP_SECONDS", "0.25"))
TIMEOUT = timedelta(seconds=float(os.environ.get("PEER_TIMEOUT_SECONDS", "1800")))


def leave_pid(folder: Path, rank: int) -> None:
    node = os.environ.get("SLURMD_NODENAME", "")
    (folder / f"rank-{rank}").write_text(f"{os.getpid()} {node}")


def note(folder: Path, step: int) -> None:
    with open(folder / "steps.txt", "a") as file:
        file.write(f"{step} {time.time()}\n")


def train(folder: Path, rank: int) -> None:
    """In a process group that is joined: its steps, and a checkpoint at every fifth."""
    leave_pid(folder, rank)
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    saved, first = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    if rank == 0:
        note(folder, first)
    for step in range(first + 1, STEPS + 1):
        time.sleep(STEP_SECONDS)
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            note(folder, step)
            if step % SAVED_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state | {"step": step}, folder / "new.pt")
                os.replace(folder / "new.pt", saved)
    dist.destroy_process_group()


def torchrun(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=TIMEOUT)
    train(folder, dist.get_rank())


def srun(folder: Path) -> None:
    """As a task of srun: the first node of the job is the one to meet at."""
    nodes = os.environ["SLURM_JOB_NODELIST"]
    names = subprocess.check_output(["scontrol", "show", "hostnames", nodes], text=True).split()
    shown = subprocess.check_output(["scontrol", "show", "node", names[0]], text=True)
    os.environ["MASTER_ADDR"] = re.search(r"NodeAddr=(\S+)", shown)[1]
    os.environ["MASTER_PORT"] = str(30_000 + int(os.environ["SLURM_JOB_ID"]) % 2000)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = (
        os.environ["SLURM_PROCID"],
        os.environ["SLURM_NTASKS"],
    )
    torchrun(folder)


class Steps:
    """What submitit runs on each task; it is queued again as it is, and resumes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self) -> None:
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export()
        torchrun(self.folder)

    def checkpoint(self) -> Any:
        import submitit

        return submitit.helpers.DelayedSubmission(Steps(self.folder))


def lightning(folder: Path) -> None:
    """The same by Lightning's trainer, which finds Slurm and queues itself again."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(64, 64)

        def on_train_start(self) -> None:
            leave_pid(folder, self.global_rank)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            time.sleep(STEP_SECONDS)
            return self.layer(batch[0]).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_rank == 0:
                note(folder, self.global_step)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    rows = torch.utils.data.TensorDataset(torch.randn(8 * STEPS * 2, 64))
    saver = ModelCheckpoint(folder, every_n_train_steps=SAVED_EVERY, save_last=True)
    trainer = L.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=1,
        num_nodes=int(os.environ["SLURM_NNODES"]),
        max_steps=STEPS,
        callbacks=[saver],
        logger=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    last = folder / "last.ckpt"
    trainer.fit(
        Module(),
        torch.utils.data.DataLoader(rows, batch_size=8),
        ckpt_path=str(last) if last.exists() else None,
    )


if __name__ == "__main__":
    {"torchrun": torchrun, "srun": srun, "lightning": lightning}[sys.argv[1]](Path(sys.argv[2]))
