"""One browser for all tests of this folder; where none is installed, they are skipped."""

from collections.abc import Iterator

import pytest

from tests.browser.chromium import Tab, find_chromium, open_browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if find_chromium() is None:
        pytest.skip("No Chromium is installed, and these tests look at pictures in a browser.")
    with open_browser(tmp_path_factory.mktemp("profile")) as tab:
        yield tab
