"""Trainers of others over our loader, run and resumed in mid-epoch: Lightning and Hugging Face's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from datasync import StreamingDataLoader, StreamingDataset
from tests.streaming.order_helpers import flat, write_dataset

BATCH, STEPS = 8, 13  # of an epoch
SAMPLES = BATCH * STEPS

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    return str(write_dataset(tmp_path_factory.mktemp("remote"), SAMPLES))


@pytest.fixture
def build(remote, tmp_path):
    def make():
        return StreamingDataset(remote=remote, local=str(tmp_path / "cache"), batch_size=BATCH, shuffle=True)

    return make


@pytest.fixture
def expected(build):
    """The batches of three epochs."""
    made = build()
    epochs = [[[int(i) for i in batch["id"]] for batch in StreamingDataLoader(made)] for _ in range(3)]
    assert all(sorted(flat(epoch)) == list(range(SAMPLES)) for epoch in epochs)
    return epochs[0] + epochs[1] + epochs[2]


@pytest.mark.parametrize("workers", [0, 1])
def test_lightning_saves_and_resumes_the_loader(build, expected, tmp_path, workers):
    lightning = pytest.importorskip("lightning", reason="Lightning is not installed")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = torch.nn.Linear(1, 1), []

        def train_dataloader(self):
            return StreamingDataLoader(build(), num_workers=workers)

        def training_step(self, batch, _):
            self.seen.append([int(i) for i in batch["id"]])
            return self.layer(batch["id"].float().unsqueeze(1)).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    def fit(steps: int, checkpoint: str | None = None) -> Model:
        model = Model()
        trainer = lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(model, ckpt_path=checkpoint)
        trainer.save_checkpoint(str(tmp_path / f"{steps}.ckpt"), weights_only=False)
        return model

    first = fit(STEPS + 6)
    assert first.seen == expected[: STEPS + 6]
    again = fit(2 * STEPS + 4, str(tmp_path / f"{STEPS + 6}.ckpt"))
    assert again.seen == expected[STEPS + 6 : 2 * STEPS + 4]


def hugging_face(folder: Path, dataset, steps: int, *, kind=None, resume: bool = False, **options):
    """Train for some steps; returns what the model saw."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    seen: list[list[int]] = []

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, id):
            seen.append([int(i) for i in id])
            return {"loss": self.layer(id.float().unsqueeze(1)).mean()}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_steps=STEPS + 6,
        learning_rate=0.0,
        use_cpu=True,
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        save_safetensors=False,
        **options,
    )
    made = (kind or transformers.Trainer)(
        model=Model(),
        args=arguments,
        train_dataset=dataset,
        data_collator=lambda samples: {"id": torch.tensor([int(sample["id"]) for sample in samples])},
    )
    made.train(resume_from_checkpoint=resume)
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_hugging_faces_trainer_takes_the_dataset_and_resumes(build, expected, tmp_path, workers):
    """Without any glue: it counts epochs, and reads again and skips what the epoch has had."""
    options = {"dataloader_num_workers": workers}
    first = hugging_face(tmp_path / "run", build(), STEPS + 6, **options)
    assert first == expected[: STEPS + 6]
    again = hugging_face(tmp_path / "run", build(), 2 * STEPS + 4, resume=True, **options)
    assert again == expected[STEPS + 6 : 2 * STEPS + 4]


def test_hugging_faces_trainer_skips_what_our_loader_gave_before(build, expected, tmp_path):
    """Without a state in the checkpoint the loader is told the epoch, and the Trainer skips."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            return StreamingDataLoader(self.train_dataset, collate_fn=self.data_collator)

    first = hugging_face(tmp_path / "run", build(), STEPS + 6, kind=Trainer)
    assert first == expected[: STEPS + 6]
    again = hugging_face(tmp_path / "run", build(), 2 * STEPS + 4, kind=Trainer, resume=True)
    assert again == expected[STEPS + 6 : 2 * STEPS + 4]


def test_hugging_faces_trainer_resumes_by_a_seek(build, expected, tmp_path):
    """With our loader and its state in the checkpoint, nothing is read again."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    loaders = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self):
            loader = StreamingDataLoader(self.train_dataset, collate_fn=self.data_collator)
            self.add_callback(Position(loader))
            loaders.append(loader)
            return loader

    class Position(transformers.TrainerCallback):
        def __init__(self, loader):
            self.loader = loader

        def on_save(self, args, state, control, **_):
            folder = Path(args.output_dir, f"checkpoint-{state.global_step}")
            (folder / "loader.json").write_text(json.dumps(self.loader.state_dict()))

        def on_train_begin(self, args, state, control, **_):
            path = Path(args.output_dir, f"checkpoint-{state.global_step}", "loader.json")
            if path.exists():
                self.loader.load_state_dict(json.loads(path.read_text()))

    options = {"kind": Trainer, "ignore_data_skip": True}
    first = hugging_face(tmp_path / "run", build(), STEPS + 6, **options)
    assert first == expected[: STEPS + 6]
    again = hugging_face(tmp_path / "run", build(), 2 * STEPS + 4, resume=True, **options)
    # What is left of the epoch, and then the next one.
    assert again == expected[STEPS + 6 : 2 * STEPS + 4]
