"""The page in a browser and on paper: nothing is cut, no text lies on another.

Skipped without chromium.
"""

import json
import re
import shutil
import subprocess

import pytest

from tilepipe.report.writing import figures_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
# A frame gives a width that no window is too large for. Coordinates are its own pixels.
FRAME = """<!DOCTYPE html><body style="margin:0"><iframe id="f" style="border:0;height:2000px;
width:{width}px"></iframe><pre id="found"></pre><script>
const frame = document.getElementById("f");
frame.onload = () => {{
  const page = frame.contentDocument, found = {{wide: [], overlaps: [], smallest: 99, texts: 0}};
  page.querySelectorAll("details").forEach((d) => {{ d.open = true; }});
  const width = page.documentElement.clientWidth;
  found.width = width;
  found.scroll = page.documentElement.scrollWidth;
  for (const element of page.body.querySelectorAll("*")) {{
    const box = element.getBoundingClientRect();
    const leaves = box.width && (box.right > width + 1 || box.left < -1);
    if (leaves || (box.width && !element.closest("svg")
        && element.scrollWidth > element.clientWidth + 1 && element.clientWidth))
      found.wide.push(element.tagName + " " + element.textContent.slice(0, 40));
  }}
  for (const svg of page.querySelectorAll("figure svg")) {{
    const outer = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].filter((t) => t.textContent.trim());
    const boxes = texts.map((t) => t.getBoundingClientRect());
    found.texts += texts.length;
    boxes.forEach((a, i) => {{
      const scale = outer.width / svg.viewBox.baseVal.width;
      found.smallest = Math.min(found.smallest, scale * parseFloat(texts[i].style.fontSize || 99));
      if (a.left < outer.left - 1 || a.right > outer.right + 1 || a.top < outer.top - 1
          || a.bottom > outer.bottom + 1)
        found.overlaps.push(texts[i].textContent + " leaves " + svg.getAttribute("aria-label"));
      boxes.slice(i + 1).forEach((b, j) => {{
        // Boxes hold the line's whole height, more than its letters.
        const dx = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const dy = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (dx > 1 && dy > 0.3 * Math.min(a.height, b.height))
          found.overlaps.push(texts[i].textContent + " on " + texts[i + 1 + j].textContent);
      }});
    }});
  }}
  document.getElementById("found").textContent = JSON.stringify(found);
}};
frame.srcdoc = {page};
</script></body>"""


def on_paper(page):
    """The page with the rules of paper in force, as no browser without a debugger shows it."""
    return page.replace("@media screen", "@media speech").replace("@media print", "@media screen")


def look_at(page, width, folder):
    """What a browser of this width finds in the page."""
    # A closing tag would end the script that holds the page.
    literal = json.dumps(page).replace("</", "<\\/")
    (folder / "frame.html").write_text(FRAME.format(width=width, page=literal), encoding="utf-8")
    command = [
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,2200",
        "--virtual-time-budget=20000",
        "--dump-dom",
        f"file://{folder / 'frame.html'}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, flags=re.DOTALL)
    return json.loads(found[1].replace("&gt;", ">").replace("&lt;", "<").replace("&amp;", "&"))


@pytest.mark.parametrize(("width", "is_paper"), [(1280, False), (400, False), (640, True)])
def test_nothing_is_cut_and_no_text_lies_on_another(
    written, full_report, width, is_paper, tmp_path
):
    page = (written / "report.html").read_text(encoding="utf-8")

    # 640 pixels are A4 between margins of 2 cm.
    found = look_at(on_paper(page) if is_paper else page, width, tmp_path)

    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["wide"] == []
    assert found["overlaps"] == []
    assert found["texts"] > 10 * len(figures_of(full_report))
    # Pixels of the type: with fewer the letters are a blur.
    assert found["smallest"] >= 8.5


def test_what_a_box_of_its_own_hides_would_be_found(tmp_path):
    found = look_at(
        '<div style="overflow-x:auto"><p style="width:900px">x</p></div>', 400, tmp_path
    )

    assert found["scroll"] == 400
    assert "DIV x" in found["wide"]


def test_an_overflow_would_be_found(tmp_path):
    wide = '<body><div style="width:900px">wide</div><figure><svg width="100" height="50">'
    texts = '<text x="5" y="20">one</text><text x="8" y="22">two</text></svg></figure></body>'

    found = look_at(wide + texts, 400, tmp_path)

    assert found["scroll"] > 400
    assert found["wide"] == ["DIV wide"]
    assert found["overlaps"] == ["one on two"]
