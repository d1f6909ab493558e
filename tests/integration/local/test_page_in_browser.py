"""The page of a run in Chromium: keyboard, tooltips, colours, widths, print, and no complaint."""

import pytest

from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import NodeSummary, Paths, Report
from azureml_elastic.local.page_server import PageServer
from azureml_elastic.report.page import run_page, write_page
from azureml_elastic.report.page_content import page_content
from tests.support.chromium import Browser
from tests.support.histories import long_run
from tests.support.paths import ROOT
from tests.support.waiting import until

CURSOR = "document.activeElement.closest('.cursor')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The URL of the page of a run with failures, losses, metrics and nodes with long names."""
    folder = tmp_path_factory.mktemp("page")
    events = [
        each.model_copy(update={"node": each.node.replace("node-1", "a-node-with-a-very-long-name-1")})
        for each in long_run(6000, nodes=4, rounds=12, failing=3)
    ]
    nodes = tuple(NodeSummary(name=name, ending="exited", exit_code=0) for name in ("node-0", "node-2", "node-3"))
    made = Report(paths=Paths.of(folder), outcome="succeeded", exit_code=0, name="run-7", nodes=nodes)
    picture = Picture.of(events)
    write_page(made.with_timeline(picture), picture, folder / "page.html")
    return (folder / "page.html").as_uri()


@pytest.fixture
def opened(browser, page):
    browser.send("Emulation.clearDeviceMetricsOverride")
    browser.send("Emulation.setEmulatedMedia", media="", features=[])
    browser.open(page)
    browser.value("localStorage.clear()")
    return browser


def test_the_page_loads_without_any_complaint_and_any_request(opened):
    assert opened.complaints == []
    assert opened.value("performance.getEntriesByType('resource').length") == 0
    assert opened.value("document.querySelectorAll('.cursor').length") > 6


def test_the_first_stop_of_the_keyboard_skips_to_the_content(opened):
    opened.press("Tab")
    assert opened.value("document.activeElement.textContent") == "Skip to the content"
    opened.press("Enter")
    assert opened.value("document.activeElement.id") == "main"


def test_charts_are_read_point_by_point_with_the_arrow_keys(opened):
    opened.value("document.querySelector('#metric-0-figure .cursor').focus()")
    assert opened.value(f"{CURSOR}.getAttribute('role')") == "slider"
    assert opened.value(f"{CURSOR}.getAttribute('aria-label')") == "loss"
    opened.press("ArrowRight")
    second = opened.value(f"{CURSOR}.getAttribute('aria-valuetext')")
    assert second.startswith("steps ")
    assert opened.value("document.querySelector('.tip').hidden") is False
    assert opened.value("document.querySelector('.tip').textContent").startswith("steps")
    opened.press("End")
    assert opened.value(f"{CURSOR}.getAttribute('aria-valuenow') === {CURSOR}.getAttribute('aria-valuemax')")
    opened.press("Escape")
    assert opened.value("document.querySelector('.tip').hidden") is True


def test_each_node_s_timeline_is_a_stop_of_its_own(opened):
    opened.value("document.querySelector('#nodes-figure .cursor').focus()")
    opened.press("ArrowRight", "ArrowRight")
    assert opened.value(f"{CURSOR}.getAttribute('aria-valuetext')").startswith("node node-0, activity ")
    opened.press("Tab")
    assert opened.value(f"{CURSOR}.getAttribute('aria-label')") == "a-node-with-a-very-long-name-1"


def test_the_pointer_shows_what_is_below_it(opened):
    opened.value("document.querySelector('#size-figure').scrollIntoView({ behavior: 'instant' })")
    box = opened.value("(({x, y, width, height}) => ({x, y, width, height}))"
                       "(document.querySelector('#size-figure .cursor').getBoundingClientRect())")  # fmt: skip
    opened.send("Input.dispatchMouseEvent", type="mouseMoved", x=box["x"] + box["width"] / 2, y=box["y"] + 20)
    assert "workers" in opened.value("document.querySelector('.tip:not([hidden])').textContent")


@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_window_or_outside_of_its_chart(opened, page, width):
    opened.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    opened.open(page)
    assert opened.value("document.documentElement.scrollWidth") <= width
    outside = """[...document.querySelectorAll('svg.chart text')].filter((text) => {
      const box = text.getBoundingClientRect();
      const figure = text.closest('section').getBoundingClientRect();
      return box.width && (box.left < figure.left - 1 || box.right > figure.right + 1);
    }).map((text) => text.textContent)"""
    assert opened.value(outside) == []


def test_a_table_that_is_wider_than_a_phone_shows_at_which_side_more_of_it_is(opened, page):
    opened.send("Emulation.setDeviceMetricsOverride", width=390, height=900, deviceScaleFactor=1, mobile=True)
    opened.open(page)
    # Phones draw no scroll bar, and the cells differ anyway: what is left is what the page draws behind them.
    opened.value("window.shown = document.querySelector('#rounds-table'); shown.style.scrollbarWidth = 'none'")
    opened.value("shown.firstChild.style.visibility = 'hidden'")
    rectangle = "(({x, y, width, height}) => ({x: x + scrollX, y: y + scrollY, width, height, scale: 1}))"
    clip = opened.value(f"{rectangle}(shown.getBoundingClientRect())")
    pictures = set()
    for left in ("0", "shown.scrollWidth / 4", "shown.scrollWidth"):
        opened.value(f"shown.scrollLeft = {left}")
        pictures.add(opened.send("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])
    assert len(pictures) == 3


@pytest.mark.parametrize("width", [390, 1280])
def test_labels_of_a_chart_do_not_overlap(opened, page, width):
    opened.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    opened.open(page)
    overlapping = """[...document.querySelectorAll('svg.chart')].flatMap((chart) => {
      const texts = [...chart.querySelectorAll('text')].map((text) => [text, text.getBoundingClientRect()])
        .filter(([, box]) => box.width);
      return texts.flatMap(([text, a], index) => texts.slice(index + 1).filter(([, b]) =>
        a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)
        .map(([other]) => [chart.getAttribute('aria-labelledby'), text.textContent, other.textContent]));
    })"""
    assert opened.value(overlapping) == []


def test_each_text_of_the_architecture_s_picture_stays_in_its_box(browser):
    browser.send("Emulation.clearDeviceMetricsOverride")
    browser.open((ROOT / "docs" / "assets" / "architecture.svg").as_uri())
    crossing = """[...document.querySelectorAll('text')].filter((text) => {
      const box = text.getBBox();
      return [...document.querySelectorAll('rect')].map((each) => each.getBBox()).some((each) =>
        each.x < box.x && box.x < each.x + each.width && each.y < box.y && box.y < each.y + each.height &&
        box.x + box.width > each.x + each.width - 4);
    }).map((text) => text.textContent)"""
    assert browser.value("document.querySelectorAll('text').length") > 30
    assert browser.value(crossing) == []


CONTRAST = """((selectors) => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const read = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const colour = read(getComputedStyle(each).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return [255, 255, 255];
  };
  return selectors.map((selector) => {
    const element = document.querySelector(selector);
    const style = getComputedStyle(element);
    const own = light(read(element.closest('svg') ? style.fill : style.color));
    const back = light(behind(element));
    return [selector, (Math.max(own, back) + 0.05) / (Math.min(own, back) + 0.05)];
  });
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_enough_contrast_in_both_colour_schemes(opened, page, scheme):
    opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    opened.open(page)
    selectors = ["h1", ".verdict", "nav a", ".facts dt", ".detail", "svg.chart text.tick", "svg.chart text.label"]
    selectors += ["svg.chart text.ending", ".legend li", ".badge", ".where", "th", "td", "footer p", "summary"]
    for selector, ratio in opened.value(f"{CONTRAST}({selectors!r})"):
        assert ratio >= 4.5, (selector, ratio)


def test_the_button_changes_the_colours_and_the_choice_lasts(opened, page):
    opened.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "light"}])
    colour = "getComputedStyle(document.body).backgroundColor"
    text = "document.getElementById('theme').textContent"
    light = opened.value(colour)
    assert opened.value(text) == "Dark", "it has the name of the colours that it changes to"
    opened.value("document.getElementById('theme').click()")
    dark = opened.value(colour)
    assert dark != light
    opened.open(page)
    assert opened.value(colour) == dark
    assert opened.value(text) == "Light"
    assert opened.value("document.getElementById('theme').ariaLabel") == "Light colours"


def test_print_has_the_whole_messages_and_no_controls(opened):
    assert opened.value("[...document.querySelectorAll('details.folded')].every((each) => !each.open)")
    opened.value("dispatchEvent(new Event('beforeprint'))")
    opened.send("Emulation.setEmulatedMedia", media="print")
    assert opened.value("[...document.querySelectorAll('details.folded')].every((each) => each.open)")
    for selector in ("#theme", "nav", "details.data", ".skip"):
        assert opened.value(f"document.querySelector('{selector}').checkVisibility()") is False
    opened.value("dispatchEvent(new Event('afterprint'))")
    assert opened.value("[...document.querySelectorAll('details.folded')].every((each) => !each.open)")
    assert len(opened.send("Page.printToPDF")["data"]) > 10_000


def test_every_image_and_control_has_a_name(opened):
    opened.send("Accessibility.enable")
    nodes = opened.send("Accessibility.getFullAXTree")["nodes"]
    nodes = [node for node in nodes if not node.get("ignored")]
    named = {"button", "image", "img", "link", "slider", "region", "navigation", "heading"}
    bare = [node for node in nodes if node["role"]["value"] in named and not node.get("name", {}).get("value")]
    assert bare == []
    roles = [node["role"]["value"] for node in nodes]
    assert roles.count("main") == roles.count("navigation") == roles.count("banner") == 1


def test_an_update_keeps_position_focus_selection_and_what_is_open(opened, tmp_path):
    events = sorted(long_run(3000, nodes=3, rounds=12, failing=6), key=lambda event: event.time)
    empty = Report(paths=Paths.of(tmp_path), outcome="unfinished", exit_code=0, name="run-1")

    def made(count, poll):
        own = Picture.of(events[:count])
        content = page_content(empty.with_timeline(own), own, running=poll is not None)
        return run_page(content, poll_seconds=poll).encode()

    pages = [made(len(events) // 2, 0.1), made(len(events), None)]
    with PageServer(lambda: pages[0]) as server:
        opened.open(server.url)
        opened.value("document.querySelector('#failure-0').open = true")
        opened.value("document.querySelector('#rounds').scrollIntoView({ behavior: 'instant' })")
        opened.value("document.querySelector('#nodes-figure .cursor').focus({ preventScroll: true })")
        opened.press("ArrowRight", "ArrowRight", "ArrowRight")
        steps = "document.querySelector('.facts .value').textContent"
        before, top = opened.value(steps), opened.value("document.querySelector('#rounds').getBoundingClientRect().top")
        pages[0] = pages[1]
        until(lambda: opened.value(steps) != before)
        until(lambda: opened.value("document.getElementById('live').textContent") == "Ended, no further updates")
    assert opened.value("document.querySelector('#failure-0').open")
    assert opened.value(f"{CURSOR}.getAttribute('aria-valuenow')") == "4"
    assert opened.value(f"{CURSOR}.closest('figure').id") == "nodes-figure"
    assert abs(opened.value("document.querySelector('#rounds').getBoundingClientRect().top") - top) < 2
    assert opened.value("document.querySelectorAll('#nodes-figure .cursor').length") == 3
    assert opened.complaints == []


def test_a_server_that_is_gone_is_shown_and_the_page_remains(opened, tmp_path):
    picture = Picture.of(long_run(300, nodes=2, rounds=2))
    made = Report(paths=Paths.of(tmp_path), outcome="unfinished", exit_code=0).with_timeline(picture)
    page = run_page(page_content(made, picture, running=True), poll_seconds=0.1).encode()
    with PageServer(lambda: page) as server:
        opened.open(server.url)
        until(lambda: opened.value("document.getElementById('live').textContent") == "Live, updates itself")
    until(lambda: "does not answer" in opened.value("document.getElementById('live').textContent"))
    assert opened.value("document.querySelectorAll('figure').length") > 3
