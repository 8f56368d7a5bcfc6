"""The model that the demo draws with: what its words and its cutting of latents do; its pictures are the command's."""

import pytest
import torch

from benchmarks.emoji import train
from benchmarks.emoji.drawing import MODEL, Artist
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


def test_an_unknown_word_is_told_with_what_can_be_drawn():
    with pytest.raises(UnknownWordError, match="does not know hole. It draws: red apple, banana, "):
        Words(["red", "apple"], torch.zeros(2, 4)).conditioning("red hole")


def test_latents_are_cut_into_tokens_as_flux_cuts_them():
    latents = torch.randn(2, 16, 4, 4)
    tokens = train.to_tokens(latents)
    assert tokens.shape == (2, 4, 64)
    assert torch.equal(tokens[0, 1], latents[0, :, :2, 2:].flatten())
    assert torch.equal(train.to_latents(tokens, 4), latents)


@pytest.mark.slow
def test_what_is_here_is_small_and_draws_what_it_is_told():
    assert sum(path.stat().st_size for path in MODEL.rglob("*") if path.is_file()) < 6_000_000
    apple, tree = Artist().draw(["red apple", "evergreen tree"])
    for picture, colour in ((apple, 0), (tree, 1)):
        middle = picture[:, 48:80, 48:80].mean((1, 2))
        assert middle.argmax() == colour
        assert middle[colour] > 1.5 * middle.sort().values[1]
        assert picture[:, :4, :4].min() > 0.9  # on white
