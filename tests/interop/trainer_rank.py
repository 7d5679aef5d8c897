"""One rank of a training by another trainer; torchrun starts it for test_trainers_ranks.

    trainer_rank.py WHAT REMOTE FOLDER STEPS SAVE KILL

What it saw goes to FOLDER/seen-WHAT-RANK.json. With KILL every rank is killed in that step, behind a
checkpoint in step SAVE; else it goes on from the checkpoint that it finds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from datasync import StreamingDataLoader, StreamingDataset
from datasync.errors import UsageError

BATCH = 8
what, remote, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
steps, save, kill = (int(text) for text in sys.argv[4:])
rank = int(os.environ["RANK"])


def build() -> StreamingDataset:
    return StreamingDataset(remote=remote, local=folder / "cache", batch_size=BATCH, shuffle=True)


def note(batch: torch.Tensor) -> None:
    """Record a batch; in the step named on the command line, die."""
    path = folder / f"seen-{what}-{rank}.json"
    seen = json.loads(path.read_text()) if path.exists() else []
    path.write_text(json.dumps([*seen, [int(i) for i in batch]]))
    if kill and len(seen) + 1 == kill:
        os.kill(os.getpid(), signal.SIGKILL)


def ids(samples: list[dict]) -> dict[str, torch.Tensor]:
    return {"id": torch.tensor([int(sample["id"]) for sample in samples])}


def refused(read) -> str:
    try:
        read()
    except UsageError as error:
        return str(error)
    return "read"


def accelerate() -> None:
    """Every way in which Accelerate divides a loader, without workers and with them."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    answers = []
    for dispatch in (None, False):
        for split in (False, True):
            for workers in (0, 1):
                AcceleratorState._reset_state()
                options = DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
                loader = torch.utils.data.DataLoader(build(), BATCH, num_workers=workers, collate_fn=ids)
                prepared = Accelerator(cpu=True, dataloader_config=options).prepare(loader)
                answers.append(refused(lambda loader=prepared: next(iter(loader))))
    AcceleratorState._reset_state()
    same = StreamingDataset(remote=remote, local=folder / "cache", batch_size=BATCH, replication=2)
    prepared = Accelerator(cpu=True).prepare(torch.utils.data.DataLoader(same, BATCH, collate_fn=ids))
    note(next(iter(prepared))["id"])  # ranks that read the same may be divided
    (folder / f"answers-{rank}.json").write_text(json.dumps(answers))


def hugging_face() -> None:
    import transformers

    # Its checkpoints on CPUs name the device cpu:0, which PyTorch does not know how to load.
    torch.serialization.register_package(0, lambda _: None, lambda it, at: it if at == "cpu:0" else None)

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = StreamingDataLoader(self.train_dataset, collate_fn=self.data_collator)
            self.add_callback(Position(loader))
            return loader

    class Position(transformers.TrainerCallback):
        def __init__(self, loader):
            self.loader = loader

        def on_save(self, args, state, control, **_):
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            if args.process_index == 0:
                path.write_text(json.dumps(self.loader.state_dict()))

        def on_train_begin(self, args, state, control, **_):
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            if path.exists():
                self.loader.load_state_dict(json.loads(path.read_text()))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, id):
            note(id)
            return {"loss": self.layer(id.float().unsqueeze(1)).mean()}

    def train(kind, resume: bool) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=steps,
            save_steps=save,
            per_device_train_batch_size=BATCH,
            learning_rate=0.0,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            remove_unused_columns=False,
            disable_tqdm=True,
            save_safetensors=False,
            ignore_data_skip=True,
        )
        kind(model=Model(), args=arguments, train_dataset=build(), data_collator=ids).train(
            resume_from_checkpoint=resume
        )

    if kill:
        answer = refused(lambda: train(transformers.Trainer, False))
        (folder / f"answers-{rank}.json").write_text(json.dumps([answer]))
    train(Trainer, not kill)


def lightning() -> None:
    import lightning as pl

    class Model(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def train_dataloader(self):
            return StreamingDataLoader(build())

        def training_step(self, batch, _):
            note(batch["id"])
            return self.layer(batch["id"].float().unsqueeze(1)).mean()

        def on_train_batch_end(self, *_):
            if self.global_step == save and kill:
                self.trainer.save_checkpoint(folder / "at.ckpt")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Model(), ckpt_path=None if kill else folder / "at.ckpt", weights_only=False)


{"accelerate": accelerate, "hugging_face": hugging_face, "lightning": lightning}[what]()
