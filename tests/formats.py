"""Accuracy on the same photographs in every format: a folder, a tar file, WebDataset shards, Hugging Face and FFCV.

PYTHONPATH=. python tests/formats.py IMAGENETTE.tar
PYTHONPATH=. torchrun --nproc-per-node 2 tests/formats.py IMAGENETTE.tar

Prints how many of 1,000 validation photographs a model of the package classifies correctly, by format and number of
loading processes.
"""

import hashlib
import io
import os
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import timm
import torch
from stream_files import encode, write_rows, write_shards

import aft_vision  # noqa: F401
from aft_vision.data import Preprocessing, Shard, Source, create_eval_loader, open_image
from aft_vision.data.datasets import open_eval_split
from aft_vision.evaluate import evaluate

LOSSLESS = {'png': {}, 'webp': {'lossless': True, 'quality': 0}}


def write_formats(root: Path, photographs: Mapping[str, Sequence[bytes]], shards: int = 2) -> dict[str, Source]:
    """Write JPEG files by class as the validation split of every format but FFCV.

    Shards named .png and .webp have the decoded pixels without loss, so that all formats have the same pixels.
    """
    classes = list(photographs)
    images = [(content, classes.index(name)) for name, files in photographs.items() for content in files]
    for index, (content, label) in enumerate(images):
        path = root / 'folder' / 'validation' / classes[label] / f'{index:05}.jpg'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    with tarfile.open(root / 'all.tar', 'w') as tar:
        tar.add(root / 'folder', arcname='.')
    rows = write_rows(root / 'rows', [images[i::shards] for i in range(shards)], classes)
    sources = {
        'folder': Source(dir=str(root / 'folder')),
        'tar': Source(dir=str(root / 'all.tar')),
        'hfds': Source(name=f'hfds/{rows}', dir=str(root / 'cache')),
    }
    for ending in ('jpg', 'jpeg', 'png', 'webp'):
        members: list[dict[str, bytes]] = [{} for _ in range(shards)]
        for index, (content, label) in enumerate(images):
            if ending in LOSSLESS:
                content = encode(open_image(io.BytesIO(content)), ending, **LOSSLESS[ending])
            members[index % shards] |= {f'{index:05}.{ending}': content, f'{index:05}.cls': str(label).encode()}
        sources[f'wds .{ending}'] = write_shards(root / ending, members, len(classes))
    return sources


def write_all(root: Path, archive: str, images: int, shards: int) -> dict[str, Source]:
    """Write the first validation photographs of each of ten classes in every format."""
    found: dict[str, list[bytes]] = {}
    with tarfile.open(archive) as tar:
        for member in sorted((m for m in tar if m.isfile() and '/val/' in m.name), key=lambda m: m.name):
            files = found.setdefault(member.name.split('/')[-2], [])
            if len(files) < images // 10:
                content = tar.extractfile(member)
                assert content is not None
                files.append(content.read())
    sources = write_formats(root, found, shards)
    from aft_vision.data.ffcv.writer import write_beton

    (root / 'ffcv').mkdir()
    write_beton(open_eval_split(sources['folder']), root / 'ffcv' / 'val.beton', None, 0, progress=False)
    return {**sources, 'ffcv': Source(dir=str(root / 'ffcv'))}


class Remembering(torch.nn.Module):
    """A model that computes each image once, because most formats have the same pixels."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model, self.known = model, dict[bytes, torch.Tensor]()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        keys = [hashlib.sha256(image.numpy().tobytes()).digest() for image in images]
        new = {key: image for key, image in zip(keys, images, strict=True) if key not in self.known}
        if new:
            self.known.update(zip(new, self.model(torch.stack(list(new.values()))), strict=True))
        return torch.stack([self.known[key] for key in keys])


def main() -> None:
    shard = Shard(int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1)))
    distributed = shard.world_size > 1
    if distributed:
        torch.distributed.init_process_group('gloo')
    torch.set_num_threads(1)
    model = Remembering(timm.create_model('aft_conv_nano', pretrained=True))
    cfg = model.model.pretrained_cfg
    preprocessing = Preprocessing(cfg['input_size'][1:], cfg['crop_pct'], cfg['mean'], cfg['std'])
    with tempfile.TemporaryDirectory() as folder:
        for name, source in write_all(Path(folder), sys.argv[1], 1000, 4).items():
            row = []
            for workers in (0, 1, 2, 5):
                loader, _ = create_eval_loader(source, preprocessing, 50, shard=shard, num_workers=workers)
                found = evaluate(model, loader, distributed=distributed)
                row.append(f'{found["top1"] * found["samples"] / 100:.0f} of {found["samples"]:.0f}')
            if shard.rank == 0:
                print(f'{shard.world_size} processes, {name}: {", ".join(row)}', flush=True)


if __name__ == '__main__':
    main()
