"""The model that the demo draws with: what its words and its cutting of latents do; its pictures are the command's."""

import pytest
import torch

from benchmarks.emoji import train
from benchmarks.emoji.glyphs import names, words_of
from benchmarks.emoji.words import LENGTH, UnknownWordError, Words, embed


def test_a_name_is_known_by_the_words_that_tell_it_from_others():
    assert words_of("Smiling face with heart-shaped eyes") == ("smiling", "face", "heart", "shaped", "eyes")
    named = names()
    assert named["\N{RED APPLE}"] == ("red", "apple")
    assert len({frozenset(words) for words in named.values()}) == len(named)
    assert max(map(len, named.values())) <= LENGTH


def test_words_become_rows_of_the_table_and_their_mean(tmp_path):
    table = torch.randn(3, 4).bfloat16().float()
    Words(["apple", "green", "red"], table).save(tmp_path / "words.safetensors")
    context, pooled = Words.read(tmp_path / "words.safetensors").conditioning("Red apple")
    assert torch.equal(context[0, :2], table[[2, 0]])
    assert context.shape == (1, LENGTH, 4)
    assert not context[0, 2:].any()
    assert torch.allclose(pooled[0], (table[2] + table[0]) / 2)


def test_no_words_are_zeros():
    context, pooled = embed(torch.full((1, LENGTH), -1), torch.randn(3, 4))
    assert not context.any()
    assert not pooled.any()


def test_an_unknown_word_names_those_that_are_known():
    with pytest.raises(UnknownWordError, match="does not know hole. It knows: apple, red"):
        Words(["red", "apple"], torch.zeros(2, 4)).conditioning("red hole")


def test_latents_are_cut_into_tokens_as_flux_cuts_them():
    latents = torch.randn(2, 16, 4, 4)
    tokens = train.to_tokens(latents)
    assert tokens.shape == (2, 4, 64)
    assert torch.equal(tokens[0, 1], latents[0, :, :2, 2:].flatten())
    assert torch.equal(train.to_latents(tokens, 4), latents)
