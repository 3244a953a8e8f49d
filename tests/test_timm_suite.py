"""The runner of timm's own tests can fail: a miniature of test_models.py in place of the real one."""

import fnmatch
from pathlib import Path

import pytest
import timm

import aft_vision  # noqa: F401, imported here so that the inner pytest runs share it
from tests import run_timm_suite, timm_suite_plugin

pytest_plugins = ['pytester']

VIT, PYRAMID = timm_suite_plugin.NATIVE_MODELS
# Passing tests of each model in the miniature, which are enough for it.
FEW = 2
HEADER = """
import pytest
from timm import list_models

VITS = ['vit_*', 'deit*']

@pytest.mark.parametrize('model_name', ['resnet18'])
def test_of_timm_alone(model_name):
    raise AssertionError('must be deselected')
"""
TEST = """
@pytest.mark.parametrize('model_name', list_models({arguments}))
def test_{name}(model_name):
    {body}
"""


@pytest.fixture(autouse=True)
def few_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm_suite_plugin, 'MIN_TESTS_PER_MODEL', FEW)


def run_mini_suite(pytester: pytest.Pytester, *tests: dict[str, str]) -> pytest.RunResult:
    """Run FEW passing tests of every model and the given ones (name, arguments, body) on aft_conv_tiny."""
    cases = [dict(name=f'passes_{i}', arguments='', body='pass') for i in range(FEW)] + list(tests)
    pytester.makepyfile(test_models=HEADER + ''.join(TEST.format(**case) for case in cases))
    plugin = ['-p', 'tests.timm_suite_plugin', '--import-mode=importlib']
    return pytester.runpytest_inprocess(*plugin, '--aft-models=aft_conv_tiny')


def list_as_native(*args, **kwargs) -> list[str]:
    return timm_suite_plugin.list_models_as_native(timm.list_models)(*args, **kwargs)


def test_the_wrapped_list_holds_the_aft_models_and_one_native_model_of_each_family():
    assert list_as_native() == [*timm.list_models('aft_*'), PYRAMID, VIT]


def test_the_wrapped_list_treats_aft_models_as_vits_when_a_filter_names_vits():
    assert 'aft_conv_tiny' in list_as_native(filter=['vit_*', 'deit*'])
    assert list_as_native(exclude_filters=['vit_*', 'deit*']) == [*timm.list_models('aft_pyramid_*'), PYRAMID]
    assert list_as_native(filter='resnet*') == []


def test_the_wrapped_list_treats_aft_vit_as_a_vit_module():
    assert list_as_native(module=['vision_transformer', 'resnet']) == [*timm.list_models(module='aft_vit'), VIT]
    assert list_as_native(module=['cpubone', 'resnet']) == [*timm.list_models(module='aft_pyramid'), PYRAMID]
    assert list_as_native(module='resnet') == []


def test_the_wrapped_list_holds_no_native_model_with_weights():
    assert list_as_native(pretrained=True) == timm.list_models('aft_*', pretrained=True)


def test_the_suite_selects_the_tests_of_the_chosen_model(pytester):
    result = run_mini_suite(pytester, dict(name='vit', arguments='VITS, include_tags=True', body='pass'))
    # Those of timm alone, of the other models and of the native ones, of which the last test takes no pyramid.
    vits, pyramids = (len(timm.list_models(module=name)) for name in ('aft_vit', 'aft_pyramid'))
    deselected = 1 + (FEW + 1) * vits + FEW * (pyramids + 1) + count_tags()
    result.assert_outcomes(passed=FEW + 1, deselected=deselected)
    assert result.ret == 0


def count_tags() -> int:
    """The native ViT appears once per tag where a test lists tags, and once where it does not."""
    return len(fnmatch.filter(timm.list_models('vit_*', include_tags=True), f'{VIT}.*')) - 1


def test_the_suite_fails_when_a_test_fails(pytester):
    result = run_mini_suite(pytester, dict(name='fails', arguments='', body='assert False'))
    result.assert_outcomes(passed=FEW, failed=1, deselected=None)
    assert result.ret != 0


def test_the_suite_fails_when_a_vit_has_a_test_that_the_aft_model_lacks(pytester):
    result = run_mini_suite(pytester, dict(name='of_a_vit', arguments=f'"{VIT}"', body='pass'))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*aft_conv_tiny and *different tests: missing [[]'test_of_a_vit'*"])


def test_the_suite_fails_when_too_few_tests_are_collected(pytester, monkeypatch):
    monkeypatch.setattr(timm_suite_plugin, 'MIN_TESTS_PER_MODEL', FEW + 1)
    result = run_mini_suite(pytester)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f'*expected {FEW + 1} tests*'])


def test_the_suite_accepts_a_size_skip_and_names_it(pytester):
    body = f'pytest.skip({timm_suite_plugin.SIZE_LIMITS[0]!r})'
    result = run_mini_suite(pytester, dict(name='skips', arguments='', body=body))
    assert result.ret == 0
    result.stdout.fnmatch_lines(['1 skipped, a size limit of timm: Fixed input size*'])


def test_the_suite_fails_on_any_other_skip(pytester):
    result = run_mini_suite(pytester, dict(name='skips', arguments='', body='pytest.skip("not today")'))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(['1 skipped, NOT a size limit of timm: a failure: not today'])


def test_the_suite_refuses_a_pattern_without_models(pytester):
    result = pytester.runpytest_inprocess('-p', 'tests.timm_suite_plugin', '--aft-models=aft_huge')
    assert result.ret == pytest.ExitCode.USAGE_ERROR


def test_the_runner_says_what_to_do_when_the_distribution_cannot_be_fetched(tmp_path, monkeypatch):
    class Failed:
        returncode = 1

    monkeypatch.setattr(run_timm_suite.subprocess, 'run', lambda command: Failed())
    with pytest.raises(SystemExit, match=r'put timm-0\.0\.tar\.gz in'):
        run_timm_suite.fetch_sdist('0.0', tmp_path)


def test_the_runner_uses_an_unpacked_distribution(tmp_path):
    test_file = Path('timm-0.0/tests/test_models.py')
    (tmp_path / test_file).parent.mkdir(parents=True)
    (tmp_path / test_file).touch()
    assert run_timm_suite.fetch_sdist('0.0', tmp_path) == tmp_path / 'timm-0.0'


def test_a_model_with_weights_may_have_the_tests_of_weights_too():
    names = {f'test_{i}' for i in range(timm_suite_plugin.MIN_TESTS_PER_MODEL)}
    tests = {VIT: names, PYRAMID: names, 'aft_conv_nano': names | {'test_model_load_pretrained'}}
    timm_suite_plugin.check_same_tests(tests, ['aft_conv_nano'])
    with pytest.raises(pytest.UsageError, match=r"aft_conv_nano .* extra \['test_other'\]"):
        timm_suite_plugin.check_same_tests({**tests, 'aft_conv_nano': {*names, 'test_other'}}, ['aft_conv_nano'])
