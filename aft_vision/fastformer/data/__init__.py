"""Texts with labels, summaries or impressions: readers of the published formats and of tables, splits, tokens."""

from aft_vision.fastformer.data.batches import tokenize_dataset
from aft_vision.fastformer.data.mind import read_mind_behaviors, read_mind_news
from aft_vision.fastformer.data.movielens import read_movielens
from aft_vision.fastformer.data.news import read_mind_topic
from aft_vision.fastformer.data.reviews import read_amazon, read_jmars
from aft_vision.fastformer.data.splits import split_dataset
from aft_vision.fastformer.data.summaries import read_hub_summaries, read_summaries, split_summaries
from aft_vision.fastformer.data.table import from_dataset, label_maps, read_hub, read_table

# Readers of labelled texts by data.kind, the name of the function without `read_`.
READERS = {
    'amazon': read_amazon,
    'jmars': read_jmars,
    'mind_topic': read_mind_topic,
    'table': read_table,
    'hub': read_hub,
}
