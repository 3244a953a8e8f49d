"""Suggestions for unknown names: by their meaning in other trainers, then by spelling."""

import difflib
from collections.abc import Iterable
from typing import Any

from aft_vision.models.transfer_source import did_you_mean

# Names of other trainers, by our keys; the first key that the experiment has is suggested.
_MEANINGS = {
    'optim.lr': 'learning_rate base_lr peak_lr max_lr blr',
    'optim.name': 'optimizer opt optim_name',
    'optim.weight_decay': 'wd decay l2',
    'optim.args': 'momentum betas opt_args opt_kwargs nesterov',
    'optim.clip_grad': 'grad_clip clip max_grad_norm gradient_clipping clip_grad_norm gradient_clip_val',
    'optim.accumulate': 'accum_iter grad_accum grad_accum_steps gradient_accumulation_steps accumulate_grad_batches',
    'optim.label_smoothing': 'smoothing label_smooth',
    'data.batch_size': 'batch bs bsz batchsize train_batch_size per_device_train_batch_size micro_batch_size',
    'data.eval_batch_size': 'val_batch_size test_batch_size per_device_eval_batch_size validation_batch_size',
    'data.img_size': 'image_size imgsize input_size resolution size crop_size img res',
    'data.num_workers': 'workers dataloader_num_workers n_workers',
    'data.dir data.path data.file': 'data_dir data_path root folder dataset train_dir data_root file dir path',
    'data.max_length data.context': 'max_seq_length seq_len sequence_length block_size max_len context_length',
    'schedule.epochs': 'num_epochs n_epochs epoch max_epochs num_train_epochs',
    'schedule.max_updates': 'steps max_steps num_steps iterations total_steps max_iters',
    'schedule.warmup_epochs schedule.warmup_updates': 'warmup warmup_steps num_warmup_steps warmup_iters warmup_ratio',
    'schedule.min_lr': 'lr_min final_lr end_lr eta_min',
    'schedule.kind schedule.step': 'sched scheduler lr_scheduler lr_scheduler_type',
    'augment.auto_augment': 'aa autoaugment randaugment rand_augment',
    'augment.random_erasing': 'reprob random_erase erasing',
    'augment.repeats': 'aug_repeats repeated_aug num_repeats',
    'augment.color_jitter': 'jitter colour_jitter colorjitter',
    'augment.hflip': 'flip horizontal_flip random_flip',
    'ema.decay': 'ema ema_decay model_ema model_ema_decay',
    'model.drop_rate model.dropout model.hidden_dropout_prob': 'drop dropout drop_rate dropout_rate dropout_prob',
    'model.drop_path_rate': 'drop_path stochastic_depth droppath',
    'model.depth model.num_hidden_layers': 'num_layers n_layers layers n_layer blocks num_blocks',
    'model.embed_dim model.dim model.hidden_size': 'width d_model hidden_dim n_embd dim hidden_size embed_dim',
    'model.num_heads model.num_attention_heads': 'heads n_head n_heads num_heads',
    'model.name model.preset': 'arch architecture backbone model_name',
    'run.dir': 'output output_dir out out_dir save_dir log_dir logdir workdir',
    'run.init_from': 'checkpoint finetune weights init initial_checkpoint pretrained_path load_from',
    'run.amp': 'fp16 bf16 precision mixed_precision half use_amp',
    'run.device': 'gpu cuda gpus accelerator',
    'run.seed run.seeds': 'random_seed manual_seed seed seeds',
    'run.grad_checkpointing': 'gradient_checkpointing checkpointing use_checkpoint',
    'run.resume': 'resume_from resume_from_checkpoint auto_resume',
    'run.overwrite': 'force overwrite_output_dir exist_ok',
    'run.compile': 'torchcompile torch_compile',
    'distill.teacher': 'teacher_model teacher_name',
}
ALIASES = {alias: keys.split() for keys, names in _MEANINGS.items() for alias in names.split()}

# The trainers of sections that a single one has.
SECTIONS = {
    'convert': 'train.convert',
    'distill': 'train.imagenet',
    'regularize': 'train.imagenet',
    'generate': 'train.fastformer',
}


def unknown(key: str, value: Any, valid: Iterable[str], kind: str) -> str:
    """Return the message of an error: the value of a key is none of the valid names, and which is meant."""
    return f'{key} = {value!r} is not {kind}{did_you_mean(str(value), valid)}'


def unknown_key(key: str, value: Any, keys: Iterable[str]) -> str:
    """Return an error message for an unknown key, with the nearest `section.key` or the trainer of its section."""
    keys, section = list(keys), key.partition('.')[0]
    if key in keys:
        return f'{key} = {value!r} is not an argument of this model'
    if section in SECTIONS and section not in keys:
        return f'{key} = {value!r} is not a key; the section {section} is one of python -m {SECTIONS[section]}'
    return f'{key} = {value!r} is not a key; the nearest is {nearest_key(key, keys)}'


def nearest_key(key: str, keys: list[str]) -> str:
    """Find the nearest key: by meaning, by name in another section, or by spelling."""
    last = key.rpartition('.')[2].lower().replace('-', '_')
    meant = [each for each in ALIASES.get(last, []) if each in keys][:1]
    elsewhere = [each for each in keys if each.rpartition('.')[2] == last]
    section = [each for each in keys if each.startswith(f'{key.rpartition(".")[0]}.')]
    spelt = difflib.get_close_matches(key, section, n=1, cutoff=0.9) or difflib.get_close_matches(key, keys, 1, 0)
    return (meant or difflib.get_close_matches(key, elsewhere, n=1, cutoff=0) or spelt)[0]
