"""Continue text with a character model.

python -m tools.continue_text --checkpoint FILE --prompt 'The history of ' --length 500
python -m tools.continue_text --checkpoint FILE --prompt-file start.txt --num-samples 4 --temperature 0.8 --top-p 0.95
python -m tools.continue_text --checkpoint FILE --length 1000 --out text.json

FILE is a checkpoint of train.char or `save_decoder`. --length is the number of bytes including the prompt, at most the
context of the model. Without a prompt, the model also samples the beginning. A model of 27 tokens is a text8 model: a
to z and the space. Bytes that are not UTF-8 are shown as U+FFFD; --out writes JSON with the text and with the bytes in
hexadecimal.

Text i has the seed --seed plus i.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tools.arguments import add_sampling, check_out
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add_sampling(parser)
    add = parser.add_argument
    prompt = parser.add_mutually_exclusive_group()
    # A text may begin as a path does.
    prompt.add_argument('--prompt', type=str, default='', help='the beginning of the text (default: empty)')
    prompt.add_argument('--prompt-file', type=Path, help='a file with the beginning of the text')
    add('--length', type=int, help='bytes of the text, including the prompt (default: the context of the model)')
    add('--num-samples', type=int, default=1, help='number of texts (default: 1)')
    add('--out', type=Path, help='also write the texts here, as JSON')
    return parser.parse_args(argv)


if __name__ == '__main__':
    parse_args()

import torch

from aft_vision.data import VOCABULARIES
from aft_vision.data.bytes import decode, encode
from aft_vision.files import write_json
from aft_vision.models import AFTDecoder
from tools.sampling import load_for, sampling_rules


def main(argv: Sequence[str] | None = None) -> list[bytes]:
    """Print the texts.

    Returns:
        The bytes of each text, including the prompt.

    Raises:
        ValueError: the checkpoint, the prompt, the device or another option is not valid.
    """
    args = parse_args(argv)
    check_out(args.out, args.checkpoint, args.prompt_file)
    model = load_for(args, 'char')
    vocabulary = vocabulary_of(model)
    prompt = args.prompt.encode() if args.prompt_file is None else args.prompt_file.read_bytes()
    tokens = torch.tensor(encode(prompt, vocabulary, 'the prompt').tolist(), dtype=torch.int64)
    drawn = model.sample(args.num_samples, args.length, tokens, seed=args.seed, **sampling_rules(args))
    texts = [decode(row.numpy(), vocabulary) for row in drawn.cpu()]
    if args.out is not None:
        rows = [{'text': text.decode(errors='replace'), 'hex': text.hex()} for text in texts]
        write_json(args.out, {'prompt': prompt.decode(errors='replace'), 'texts': rows})
    print('\n---\n'.join(text.decode(errors='replace') for text in texts))
    return texts


def vocabulary_of(model: AFTDecoder) -> str:
    """Return the vocabulary of a model, by its number of tokens.

    Raises:
        ValueError: no vocabulary has this number of tokens.
    """
    for name, size in VOCABULARIES.items():
        if model.vocab_size == size:
            return name
    known = ' or '.join(f'{size} ({name})' for name, size in VOCABULARIES.items())
    raise ValueError(f'expected a model of {known} tokens, got one of {model.vocab_size}')


if __name__ == '__main__':
    run_command(main)
