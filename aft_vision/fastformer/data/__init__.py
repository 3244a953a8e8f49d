"""Texts with labels, and impressions: readers of the published formats and of tables, stratified parts, tokens."""

from aft_vision.fastformer.data.batches import tokenize_dataset
from aft_vision.fastformer.data.mind import read_mind_behaviors, read_mind_news
from aft_vision.fastformer.data.movielens import read_movielens
from aft_vision.fastformer.data.news import read_ag_news, read_mind_topic
from aft_vision.fastformer.data.reviews import read_acl_imdb, read_amazon, read_jmars
from aft_vision.fastformer.data.splits import split_dataset
from aft_vision.fastformer.data.table import from_dataset, label_maps, read_hub, read_table

# Of texts with labels, by the name that an experiment gives a kind of data set: that of its function.
READERS = {
    'amazon': read_amazon,
    'jmars': read_jmars,
    'acl_imdb': read_acl_imdb,
    'mind_topic': read_mind_topic,
    'ag_news': read_ag_news,
    'table': read_table,
    'hub': read_hub,
}

__all__ = [
    'READERS',
    'from_dataset',
    'label_maps',
    'read_acl_imdb',
    'read_ag_news',
    'read_amazon',
    'read_hub',
    'read_jmars',
    'read_mind_behaviors',
    'read_mind_news',
    'read_mind_topic',
    'read_movielens',
    'read_table',
    'split_dataset',
    'tokenize_dataset',
]
