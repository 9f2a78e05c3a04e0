"""The page in a real browser: drawn, read, zoomed, sorted, on a phone, in the dark, on paper."""

from __future__ import annotations

import base64
import os
import shutil

import pytest

from lpom.report import write_report

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver (Debian: chromium-driver)"
)
OPTIONS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1200,900",
)
PHONE = 380


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for option in OPTIONS:
        options.add_argument(option)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # which does not work for root
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def pages(digits, deep, tmp_path_factory):
    """The addresses of a page about one run, and of one that compares two."""
    folder = tmp_path_factory.mktemp("pages")
    write_report([digits[0]], folder / "one.html")
    write_report([digits[0], deep[0]], folder / "two.html")
    return {name: (folder / f"{name}.html").as_uri() for name in ("one", "two")}


@pytest.fixture
def one(driver, pages):
    """The page about one run, freshly opened; no test may leave an error on the console."""
    driver.get(pages["one"])
    yield driver
    assert_quiet(driver)


@pytest.fixture
def two(driver, pages):
    driver.get(pages["two"])
    yield driver
    assert_quiet(driver)


def assert_quiet(driver):
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def all_of(driver, selector):
    return driver.find_elements(By.CSS_SELECTOR, selector)


def plot(driver, title):
    (found,) = [p for p in all_of(driver, ".plot") if heading(p) == title]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
    return found, found.find_element(By.CSS_SELECTOR, ":scope > svg")


def heading(figure):
    return figure.find_element(By.TAG_NAME, "h3").text


def ticks(figure, axis="x"):
    return [text.text for text in figure.find_elements(By.CSS_SELECTOR, f"text.{axis}")]


def readout(figure):
    return figure.find_element(By.CLASS_NAME, "readout")


def drag(driver, svg, start, end):
    """From one place to another, each in pixels from the middle of the plot."""
    pointer = ActionChains(driver, duration=20)
    pointer.move_to_element_with_offset(svg, *start).click_and_hold()
    pointer.move_to_element_with_offset(svg, *end).release().perform()


def column(driver, k):
    cells = f".recall tbody tr > :nth-child({k})"
    return [cell.text for cell in all_of(driver, cells)]


def overflow(driver):
    return driver.execute_script(
        "const page = document.documentElement; return page.scrollWidth - page.clientWidth"
    )


def emulate(driver, **features):
    chosen = [{"name": n.replace("_", "-"), "value": v} for n, v in features.items()]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": chosen})


def test_every_plot_has_a_point_per_epoch(one, digits):
    titles = {
        "Accuracy per epoch": 2,
        "Accuracy over time": 2,
        "Loss": 2,
        "Objective of a fixed batch": 1,
        "Gap per sample": 2,
        "Contraction rate": 2,
    }
    figures = all_of(one, "#curves ~ .plots .plot, details:has(#layers) .plot")
    assert [heading(figure) for figure in figures] == list(titles)
    for figure, curves in zip(figures, titles.values(), strict=True):
        paths = [p.get_attribute("d") for p in figure.find_elements(By.CLASS_NAME, "curve")]
        assert len(paths) == curves
        for path in paths:
            assert path.count("M") + path.count("L") == len(digits[1].history)
            assert "NaN" not in path and "Infinity" not in path


def test_pointing_at_a_plot_reads_the_values_of_the_nearest_epoch(one, digits):
    figure, svg = plot(one, "Accuracy per epoch")
    assert not readout(figure).is_displayed()
    ActionChains(one, duration=20).move_to_element_with_offset(
        svg, svg.size["width"] // 2 - 20, 0
    ).perform()
    last = digits[1].history[-1]
    text = readout(figure).text
    assert f"epoch {len(digits[1].history)}" in text
    for value in (last.score, last.validation_score):
        assert f"{round(100 * value, 2):g} %" in text
    ActionChains(one, duration=20).move_to_element(one.find_element(By.ID, "curves")).perform()
    assert not readout(figure).is_displayed()


def test_dragging_zooms_and_a_double_click_or_the_button_goes_back(one):
    figure, svg = plot(one, "Loss")
    button = figure.find_element(By.CSS_SELECTOR, "header button")
    before = ticks(figure, "x"), ticks(figure, "y")
    assert before[0] == ["1", "2", "3", "4"] and not button.is_displayed()

    drag(one, svg, (0, 0), (svg.size["width"] // 2 - 5, 5))
    assert ticks(figure, "x") == ["3", "4"] and button.is_displayed()
    assert ticks(figure, "y") != before[1]
    ActionChains(one, duration=20).double_click(svg).perform()
    assert (ticks(figure, "x"), ticks(figure, "y")) == before

    drag(one, svg, (-150, -90), (20, 60))
    assert (ticks(figure, "x"), ticks(figure, "y")) != before
    button.click()
    assert (ticks(figure, "x"), ticks(figure, "y")) == before


def touch(driver, *points):
    """Put a finger down at the first point, move it over the others, and lift it."""
    for k, (x, y) in enumerate(points):
        event = {"type": "touchMove" if k else "touchStart", "touchPoints": [{"x": x, "y": y}]}
        driver.execute_cdp_cmd("Input.dispatchTouchEvent", event)
    driver.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})


def test_a_finger_reads_and_zooms_too(one):
    figure, svg = plot(one, "Loss")
    box = one.execute_script("return arguments[0].getBoundingClientRect().toJSON()", svg)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    touch(one, (x + 50, y))
    assert "epoch 3" in readout(figure).text
    touch(one, (x, y), (x + 60, y), (x + 180, y))
    assert ticks(figure, "x") == ["3"]


def test_keys_read_values_and_leave_the_zoom(one, digits):
    figure, svg = plot(one, "Gap per sample")
    drag(one, svg, (0, 0), (svg.size["width"] // 2 - 5, 0))
    assert ticks(figure) == ["3", "4"]
    one.execute_script("arguments[0].focus()", svg)
    svg.send_keys(Keys.ESCAPE)
    assert ticks(figure) == ["1", "2", "3", "4"]
    svg.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert "epoch 2" in readout(figure).text and "layer 2" in readout(figure).text
    svg.send_keys(Keys.ARROW_LEFT)
    assert "epoch 1" in readout(figure).text


def test_a_name_below_a_plot_switches_its_curve_off_and_on(one):
    figure, _ = plot(one, "Loss")
    (validation, _) = figure.find_elements(By.CSS_SELECTOR, ".legend button")
    for count in (1, 2):
        validation.click()
        assert len(figure.find_elements(By.CLASS_NAME, "curve")) == count
        assert validation.get_attribute("aria-pressed") == str(count == 2).lower()


def test_headers_sort_the_classes_both_ways(one):
    unsorted = column(one, 1)
    (recall,) = [b for b in all_of(one, ".recall th button") if b.text == "recall"]
    recall.click()
    shares = [float(share.removesuffix(" %")) for share in column(one, 3)]
    assert shares == sorted(shares) and len(set(shares)) > 1
    assert recall.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"
    recall.click()
    shares = [float(share.removesuffix(" %")) for share in column(one, 3)]
    assert shares == sorted(shares, reverse=True)
    all_of(one, ".recall th button")[0].click()
    assert column(one, 1) == unsorted


def test_pointing_at_the_confusion_matrix_tells_the_count(one):
    cell = all_of(one, ".confusion tbody td")[0]
    ActionChains(one, duration=20).move_to_element(cell).perform()
    told = one.find_element(By.CSS_SELECTOR, ".confusion output").text
    assert told.startswith(f"True 0, predicted 0: {cell.text} of ")


def test_pictures_are_shown_and_described(one):
    sizes = one.execute_script(
        "return [...document.images].map(i => [i.complete && i.naturalWidth, i.alt])"
    )
    assert len(sizes) > 16 and all(width == 8 and alt for width, alt in sizes)


def test_probabilities_have_a_curve_for_each_class(one):
    for title, count in (
        ("ROC curve (area)", 11),  # and chance
        ("Precision and recall (average precision)", 10),
        ("How sure, and how often right", 2),
    ):
        figure, _ = plot(one, title)
        paths = [p.get_attribute("d") for p in figure.find_elements(By.CLASS_NAME, "curve")]
        assert len(paths) == count and not any("NaN" in path for path in paths)


@pytest.fixture
def number(driver, flats, tmp_path):
    write_report([flats[0]], tmp_path / "page.html")
    driver.get((tmp_path / "page.html").as_uri())
    yield driver
    assert_quiet(driver)


def test_a_run_that_predicts_numbers_draws_a_dot_per_test_row(number, flats):
    rows = flats[1].config["data"]["rows"]["test"]
    for title in ("Predicted against true", "Residuals"):
        figure, _ = plot(number, title)
        (dots,) = figure.find_elements(By.CSS_SELECTOR, ".points")
        assert dots.get_attribute("d").count("h0") == rows
    shown = number.find_element(By.CSS_SELECTOR, ".scores").text
    assert "MAE" in shown and "always the mean" in shown
    bars = [bar.size["width"] for bar in all_of(number, ".importance .bar i")]
    assert bars == sorted(bars, reverse=True) and bars[0] > 100
    (error,) = [b for b in all_of(number, ".rows th button") if b.text == "error"]
    error.click()
    found = [float(cell.text) for cell in all_of(number, ".rows tbody tr > :nth-child(4)")]
    assert found == sorted(found) and len(found) == 24


def test_two_runs_have_a_table_side_by_side(two):
    head = [cell.text for cell in all_of(two, "section:has(#results) thead th")]
    assert head[:3] == ["run", "method", "accuracy"] and "seconds" in head
    (epochs,) = [b for b in all_of(two, "section:has(#results) th button") if b.text == "epochs"]
    epochs.click()
    epochs.click()
    names = [cell.text for cell in all_of(two, "section:has(#results) tbody th")]
    assert names == ["deep", "digits"]


def test_two_runs_lie_over_each_other_layer_by_layer_if_asked(two):
    figure, _ = plot(two, "Accuracy per epoch")
    names = [b.text for b in figure.find_elements(By.CSS_SELECTOR, ".legend button")]
    assert names == [f"{run}, {part}" for run in ("digits", "deep")
                     for part in ("validation", "training")]  # fmt: skip
    gaps, _ = plot(two, "Gap per sample")
    options = all_of(two, "#layer-choice option")
    for option, count in (
        ("deep, all layers", 10),
        ("layer 2, all runs", 2),
        ("layer 9, all runs", 1),
    ):
        next(o for o in options if o.text == option).click()
        assert len(gaps.find_elements(By.CLASS_NAME, "curve")) == count
    differ = {row.text for row in all_of(two, ".differs th")}
    assert {"sizes", "epochs", "activation"} <= differ and "seed" not in differ


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_phone_needs_no_sideways_scrolling(driver, pages, name):
    phone = {"width": PHONE, "height": 800, "deviceScaleFactor": 2, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        driver.get(pages[name])
        assert driver.execute_script("return innerWidth") == PHONE
        assert overflow(driver) == 0
        figure, svg = plot(driver, "Loss")
        assert 300 < svg.size["width"] <= PHONE and len(ticks(figure)) >= 2
        folded = driver.execute_script("return document.documentElement.scrollHeight")
        for part in all_of(driver, "details.part"):
            assert part.get_attribute("open") is None
            driver.execute_script("arguments[0].open = true", part)
        assert overflow(driver) == 0
        assert folded < 0.6 * driver.execute_script("return document.documentElement.scrollHeight")
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert_quiet(driver)


def test_colours_follow_the_system_and_stay_readable(one):
    lightness = (
        "const c = getComputedStyle(document.body)[arguments[0]].match(/\\d+/g).map(Number);"
        "return (c[0] + c[1] + c[2]) / 765"
    )
    for scheme, sign in (("light", 1), ("dark", -1)):
        emulate(one, prefers_color_scheme=scheme)
        paper = one.execute_script(lightness, "backgroundColor")
        ink = one.execute_script(lightness, "color")
        assert sign * (paper - ink) > 0.7
    emulate(one)


def test_it_prints(one):
    paper = one.execute_cdp_cmd("Page.printToPDF", {"paperWidth": 8.27, "paperHeight": 11.69})
    assert base64.b64decode(paper["data"]).startswith(b"%PDF-")
    one.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert not one.find_element(By.ID, "contents").is_displayed()
    assert all_of(one, ".plot .curve")[0].is_displayed()
    one.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_hostile_names_are_shown_as_they_are(driver, hostile, tmp_path):
    write_report([hostile[0]], tmp_path / "page.html")
    driver.get((tmp_path / "page.html").as_uri())  # an alert would make the next line raise
    assert sorted(column(driver, 1)) == sorted(hostile[1].predictor.target.classes)
    assert all_of(driver, "h1")[0].text == f"lpom: {hostile[0].name}"
    assert not all_of(driver, "main script, main img, main b")
    assert_quiet(driver)


def test_a_run_without_epochs_has_no_empty_plots(driver, train, tmp_path):
    train(tmp_path / "run", "diabetes", epochs=1)
    (tmp_path / "run" / "history.jsonl").write_text("")
    write_report([tmp_path / "run"], tmp_path / "page.html")
    driver.get((tmp_path / "page.html").as_uri())
    assert_quiet(driver)
    assert not all_of(driver, "#curves ~ .plots svg, #layers ~ .plots svg")
    assert "No epoch was finished" in driver.find_element("id", "main").text


def test_nothing_is_fetched(one):
    loaded = one.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert [name for name in loaded if not name.startswith("data:")] == []
