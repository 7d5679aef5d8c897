"""`datasync generate`: text or captions from a run's checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def generate(
    run: Annotated[Path, typer.Argument(help="The run's folder.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Continue this text; may be given several times.")
    ] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Caption this image file; may be given several times.")
    ] = None,
    samples: Annotated[
        int, typer.Option(help="Without prompt or image: caption so many samples.", min=1)
    ] = 8,
    grid: Annotated[
        Path | None, typer.Option(help="Write image, truth and caption side by side: .html or .png.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Which checkpoint. [default: the newest]")] = None,
    max_tokens: Annotated[int, typer.Option(help="Most new tokens.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.", min=0.0)] = 0.0,
    top_k: Annotated[int, typer.Option(help="Draw from so many likeliest tokens; 0: all.", min=0)] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON document.")] = False,
) -> None:
    """Generate text, or captions of images, from the newest good checkpoint of a run.

    Without prompt or image it captions samples of the run's validation set, or of its training data.

    \b
      datasync generate runs/a --prompt "In the beginning" --temperature 0.8
      datasync generate runs/a --samples 16 --grid captions.html
    """
    from datasync.cli.train import use_clusters
    from train import generate as library

    use_clusters()
    trained = library.load(run, step=step, device=device)
    options = {"max_new": max_tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
    tokenizer = trained.encoder.tokenizer
    if prompt:
        prompts: list[tuple[list[int], list[Any]]] = [
            ([tokenizer.bos, *tokenizer.encode(text)], []) for text in prompt
        ]
        new = library.generate(trained.model, prompts, eos=tokenizer.eos, **options)  # type: ignore[arg-type]
        texts = [text + tokenizer.decode(ids) for text, ids in zip(prompt, new, strict=True)]
        print(json.dumps(texts) if as_json else "\n\n".join(texts))
        return
    examples = library.caption(trained, _samples(trained, image or [], samples), **options)
    if grid is not None:
        library.write_grid(examples, grid, title=f"{run}, step {trained.step}")
    if as_json:
        print(json.dumps([{"truth": e.truth, "generated": e.generated} for e in examples]))
        return
    for example in examples:
        print(f"{example.truth}  →  {example.generated}" if example.truth else example.generated)
    if grid is not None:
        print(grid)


def _samples(trained: object, images: list[Path], count: int) -> list[dict[str, object]]:
    """The named files, or samples of the run's fixed set."""
    from train.data import fixed_samples, open_fixed
    from train.generate import Trained

    assert isinstance(trained, Trained)
    if images:
        return [{trained.config.data.image: path.read_bytes()} for path in images]
    dataset = open_fixed(trained.config)
    return [dataset[i] for i in fixed_samples(dataset, count)]
