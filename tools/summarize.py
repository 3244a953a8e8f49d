"""Summarise texts with a trained model.

python -m tools.summarize --model runs/fastformer/small_bbc/seed_0/best article.txt
python -m tools.summarize --model FOLDER --num-beams 5 --max-tokens 100 *.txt --out summaries.jsonl
python -m tools.summarize --model FOLDER < article.txt

FOLDER has a model and its tokenizer, as train.fastformer writes them to seed_N/best. Each file, in UTF-8, is one text;
without files, or with -, standard input is one text. Longer texts than in training are truncated. The defaults of the
options are those saved with the model.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tools.arguments import add_device, check_out, parse_count, parse_positive
from train.command_line import CommandParser, run_command


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandParser(__doc__)
    add = parser.add_argument
    add('--model', type=Path, required=True, metavar='FOLDER', help='a saved model with its tokenizer')
    add('files', nargs='*', default=['-'], metavar='FILE', help='texts (default: standard input)')
    add('--num-beams', type=parse_positive, help='beams of the search; 1 takes the most likely token each time')
    add('--max-tokens', type=parse_positive, help='maximal length of a summary')
    add('--min-tokens', type=parse_count, dest='min_new_tokens', help='minimal length of a summary')
    add('--length-penalty', type=float, help='above 0 favours long summaries among the beams, below 0 short ones')
    add(
        '--no-repeat',
        type=parse_count,
        dest='no_repeat_ngram_size',
        metavar='N',
        help='no sequence of N tokens occurs twice; 0 allows any',
    )
    add('--batch-size', type=parse_positive, default=8, help='texts per batch (default: 8)')
    add('--out', type=Path, help='also write the summaries here, as JSON lines')
    add_device(parser)
    args = parser.parse_args(argv)
    if None not in (args.max_tokens, args.min_new_tokens) and args.min_new_tokens > args.max_tokens:
        parser.error(f'expected --min-tokens of at most --max-tokens {args.max_tokens}, got {args.min_new_tokens}')
    return args


if __name__ == '__main__':
    parse_args()

from aft_vision.devices import use_device
from aft_vision.fastformer.summarize import load_summarizer, summarize
from aft_vision.files import keeping_rows


def main(argv: Sequence[str] | None = None) -> list[str]:
    """Print the summaries, and return them.

    Raises:
        ValueError: the model, a file or an option is not valid.
    """
    args = parse_args(argv)
    check_out(args.out, *map(Path, args.files))
    if args.out is not None and args.out.is_dir():
        raise ValueError(f'expected a file for the summaries, got --out {args.out}, a folder')
    texts = [read_text(name) for name in args.files]
    model, tokenizer = load_summarizer(args.model, use_device(args.device))
    names = ('num_beams', 'min_new_tokens', 'length_penalty', 'no_repeat_ngram_size')
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.max_tokens is not None:
        longest = getattr(model.config, 'max_target_positions', args.max_tokens)
        if args.max_tokens > longest:
            raise ValueError(f'expected --max-tokens of at most {longest}, as the model takes, got {args.max_tokens}')
        # It counts the start token.
        options['max_length'] = args.max_tokens + 1
    summaries: list[str] = []
    with keeping_rows(args.out) if args.out is not None else nullcontext(lambda row: None) as keep:
        for start in range(0, len(texts), args.batch_size):
            batch = texts[start : start + args.batch_size]
            for summary in summarize(model, tokenizer, batch, args.batch_size, **options):
                name = args.files[len(summaries)]
                summaries.append(summary)
                keep({'file': name, 'summary': summary})
                print(f'{name}:\n{summary}\n' if len(texts) > 1 else summary)
    return summaries


def read_text(name: str) -> str:
    """Read the text of a file, or standard input for -.

    Raises:
        ValueError: it is missing, not UTF-8, or blank.
    """
    try:
        text = sys.stdin.read() if name == '-' else Path(name).read_text(encoding='utf-8-sig')
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f'expected a text in UTF-8 in {name}, got: {error}') from error
    if not text.strip():
        raise ValueError(f'expected a text in {name}, got none')
    return text


if __name__ == '__main__':
    run_command(main)
