"""The page of a run in a real browser (chromium, driven by selenium): it draws, its controls work, it loads nothing.

Without a browser these tests are skipped, or fail where ``VERL_DIGEN_REQUIRE_BROWSER=1`` says that there must be one.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil

import pytest

from tests.bench.fake_run import HOSTILE, write_grid, write_run
from verl_digen.bench.report import write_report

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    needed = {"chromium": CHROMIUM, "chromedriver": DRIVER, "selenium": importlib.util.find_spec("selenium")}
    missing = ", ".join(name for name, found in needed.items() if not found)
    if missing and os.environ.get("VERL_DIGEN_REQUIRE_BROWSER") == "1":
        pytest.fail(f"a browser is required, and {missing} is missing; tests/run.sh installs it")
    if missing:
        pytest.skip(f"{missing} is missing (Debian: apt-get install chromium chromium-driver; pip install selenium)")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (
        *("headless", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "disable-background-networking"),
        *("disable-component-update", "disable-sync", "window-size=1280,1600"),
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("browser") / "run")


@pytest.fixture
def show(browser, tmp_path):
    """Open the page of a run; returns the browser. No script error and no request besides the file itself."""

    def open_page(folder):
        file = write_report(folder, tmp_path / "page.html")
        browser.get(file.as_uri())
        assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
        events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
        asked = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        urls = [params["request"]["url"] for params in asked if params["documentURL"] == file.as_uri()]
        assert file.as_uri() in urls
        assert [url for url in urls if url != file.as_uri() and not url.startswith("data:")] == []
        return browser

    return open_page


def text(browser, selector: str) -> str:
    return browser.find_element("css selector", selector).text


def count(browser, selector: str) -> int:
    return len(browser.find_elements("css selector", selector))


def slide(browser, id: str, to: int) -> None:
    script = (
        "const e = document.getElementById(arguments[0]); e.value = arguments[1]; e.dispatchEvent(new Event('input'))"
    )
    browser.execute_script(script, id, to)


def test_the_page_shows_the_run(show, run_dir):
    page = show(run_dir)
    assert text(page, "#title") == "digits / flow_grpo" and "verl 0.9" in text(page, "#subtitle")
    figures = {f.text.split("\n")[0]: f.text.split("\n")[1] for f in page.find_elements("css selector", ".figure")}
    assert figures["validation accuracy"] == "0.950" and figures["spread"] == "0.110"
    assert "None." in text(page, "#notes")
    titles = [h.text for h in page.find_elements("css selector", "#charts h3")]
    for title in (
        "Reward",
        "Validation",
        "judge (digit_quality)",
        "spread (digit_quality)",
        "KL",
        "Clip fraction",
        "Gradient norm",
    ):
        assert title in titles
    for title in ("Log-prob gap", "Step time, s", "Bubbles, device-seconds"):
        assert title in titles
    reward = page.find_element("css selector", "#charts .chart polyline").get_attribute("points").split()
    heights = [float(point.split(",")[1]) for point in reward]
    assert len(reward) == 20 and heights == sorted(heights, reverse=True)  # the reward rises
    assert "disaggregated + GAP + TSP" in text(page, "#plan")
    assert "NaN" not in page.page_source.split('id="run"')[0]
    assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")


def test_the_sliders_change_samples_and_timeline(show, run_dir):
    page = show(run_dir)
    image = page.find_element("css selector", "#grid")
    last = image.get_attribute("src")
    assert (
        text(page, "#grid-step") == "step 20" and page.execute_script("return arguments[0].naturalWidth", image) > 100
    )
    slide(page, "grid-slider", 0)
    assert text(page, "#grid-step") == "step 0" and image.get_attribute("src") != last
    assert [t.text for t in page.find_elements("css selector", "#timeline-plot .row-name")] == [
        *("replica0", "trainer", "reward", "publish")
    ]
    assert count(page, "#timeline-plot .span") == 14 and count(page, "#timeline-plot .bubble") == 1
    slide(page, "trace-slider", 0)
    assert text(page, "#trace-step") == "step 10"


def test_settings_are_filtered_and_any_metric_can_be_drawn(show, run_dir):
    page = show(run_dir)
    assert "trainer.v1.digen.gap.enable\ttrue" in page.find_element("css selector", "#settings-table").get_property(
        "innerText"
    )
    field = page.find_element("css selector", "#filter")
    field.clear()
    field.send_keys("optim lr")
    assert text(page, "#settings-table") == "actor_rollout_ref.actor.optim.lr 0.0005"
    page.execute_script(
        "const m = document.getElementById('metric'); m.value = 'actor/lr'; m.dispatchEvent(new Event('input'))"
    )
    assert text(page, "#any-chart h3") == "actor/lr"


def test_pointing_at_a_chart_or_a_span_says_what_it_is(show, run_dir):
    from selenium.webdriver import ActionChains

    page = show(run_dir)
    for selector, words in (("#charts svg", ["step ", "mean: "]), ("#timeline-plot .span", ["generate", "fragment 0"])):
        target = page.find_element("css selector", selector)
        page.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
        ActionChains(page).move_to_element(target).perform()
        assert all(word in text(page, "#tip") for word in words)


def test_text_of_a_run_is_text(show, tmp_path):
    page = show(write_run(tmp_path / "run", name=HOSTILE))
    assert HOSTILE in text(page, "#title") and page.title != "taken"
    assert count(page, "img") == 1


def test_a_run_that_wrote_little_has_a_page_that_says_so(show, tmp_path):
    write_grid(tmp_path / "run", 7)
    page = show(tmp_path / "run")
    assert text(page, "#grid-step") == "step 7"
    assert "trainer.logger" in text(page, "#missing") and "trace.every" in text(page, "#missing")
    assert not any(count(page, f"#{section}") for section in ("curves", "timeline", "plan", "settings", "any"))
