// The page with the slider: what a format makes of a recorded histogram at a scale. The same rules as
// gradscale/histogram.py; tests/docs/test_slider.py compares the numbers of both.
"use strict";

(() => {
  const { formats, histograms } = JSON.parse(document.getElementById("scale-data").textContent);
  const MARGIN_BITS = 2; // the default of best_static_scale
  const HIGHEST_EXPONENT = 126; // scales lie between 2**-126 and 2**126
  const SVG = "http://www.w3.org/2000/svg";
  const byId = (name) => document.getElementById("scale-" + name);

  // Share of a bin's elements below a magnitude, if they are uniformly distributed in it.
  const below = (magnitude, exponent) => Math.min(1, Math.max(0, magnitude / 2 ** exponent - 1));

  // Shares of all elements: weight(exponent) is the share of each bin that counts.
  function share(histogram, weight) {
    let sum = 0;
    let total = 0;
    histogram.counts.forEach((count, index) => {
      sum += count * weight(histogram.first_exponent + index);
      total += count;
    });
    return sum / Math.max(1, total);
  }

  function shares(histogram, format, scale) {
    const zero = format.smallest_subnormal / 2 / scale;
    const normal = format.smallest_normal / scale;
    const end = format.overflow_threshold / scale;
    const lost = share(histogram, (e) => below(zero, e));
    const subnormal = share(histogram, (e) => below(normal, e) - below(zero, e));
    const overflow = share(histogram, (e) => 1 - below(end, e));
    return { lost, subnormal, normal: 1 - lost - subnormal - overflow, overflow };
  }

  // The exponent of the largest power of two that keeps the highest bin below the maximum, by the margin.
  function bestExponent(histogram, format) {
    const highest = histogram.first_exponent + histogram.counts.length - 1;
    const best = Math.floor(Math.log2(format.max) - (highest + 1) - MARGIN_BITS);
    return Math.min(Math.max(best, -HIGHEST_EXPONENT), HIGHEST_EXPONENT);
  }

  function percent(share) {
    if (share === 0) return "0%";
    if (share < 0.0001) return "< 0.01%";
    return (100 * share).toFixed(share < 0.01 ? 2 : 1) + "%";
  }

  function element(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text) made.textContent = text;
    return made;
  }

  // Which part of the format a bin falls into, by its lower end.
  function zone(exponent, format) {
    const lower = 2 ** exponent;
    if (lower < format.smallest_subnormal / 2) return "lost";
    if (lower < format.smallest_normal) return "subnormal";
    return lower > format.max ? "overflow" : "normal";
  }

  function draw(histogram, format, exponent) {
    const picture = byId("picture");
    const width = picture.clientWidth || 640;
    const height = picture.clientHeight || 260;
    const [floor, top] = [height - 26, 30];
    const log = Math.log2;
    // FP16 and FP8 share a view, so that they can be compared; BF16 needs a wider one.
    const [first, last] = log(format.max) > 100 ? [-140, 132] : [-58, 40];
    const x = (e) => ((e - first) / (last - first)) * width;
    const parts = [];
    const [zero, normal, end] = [log(format.smallest_subnormal) - 1, log(format.smallest_normal), log(format.max)];
    const box = { y: top, height: floor - top };
    parts.push(element("rect", { class: "range range--subnormal", x: x(zero), width: x(normal) - x(zero), ...box }));
    parts.push(element("rect", { class: "range", x: x(normal), width: x(end) - x(normal), ...box }));
    const most = Math.max(...histogram.counts);
    histogram.counts.forEach((count, index) => {
      const e = histogram.first_exponent + index + exponent;
      if (!count || e < first || e >= last) return;
      const tall = Math.max(1, (count / most) * (floor - top - 8));
      const bar = { x: x(e), y: floor - tall, width: Math.max(1, x(e + 1) - x(e) - 1), height: tall };
      parts.push(element("rect", { class: zone(e, format), ...bar }));
    });
    parts.push(element("line", { class: "axis", x1: 0, x2: width, y1: floor, y2: floor }));
    const step = ((last - first) / width) * 44 > 16 ? 32 : ((last - first) / width) * 44 > 8 ? 16 : 8;
    for (let tick = Math.ceil(first / step) * step; tick < last; tick += step) {
      const label = element("text", { x: x(tick), y: height - 8, "text-anchor": "middle" }, "2");
      label.append(element("tspan", { dy: -5, "font-size": 9 }, String(tick)));
      parts.push(label);
    }
    const middle = { y: 18, "text-anchor": "middle" };
    if (x(zero) > 60) parts.push(element("text", { x: 0, y: 18 }, "becomes 0"));
    parts.push(element("text", { x: x((Math.max(zero, first) + end) / 2), ...middle }, "range of the format"));
    if (width - x(end) > 60) parts.push(element("text", { x: width, y: 18, "text-anchor": "end" }, "overflows"));
    picture.replaceChildren(...parts);
  }

  function update() {
    const histogram = histograms[byId("histogram").value];
    const format = formats[byId("format").value];
    const exponent = Number(byId("exponent").value);
    const found = shares(histogram, format, 2 ** exponent);
    for (const [name, value] of Object.entries(found)) {
      byId(name).textContent = percent(value);
      byId(name).dataset.share = value;
    }
    byId("value").textContent = `2^${exponent} = ${(2 ** exponent).toLocaleString("en")}`;
    byId("exponent").setAttribute("aria-valuetext", `2 to the power of ${exponent}`);
    const best = bestExponent(histogram, format);
    byId("best").textContent = `Best static scale: 2^${best}`;
    byId("best").dataset.exponent = best;
    byId("picture").setAttribute(
      "aria-label",
      `Histogram of the gradients at a scale of 2 to the power of ${exponent}: ${percent(found.lost)} become zero, ` +
        `${percent(found.subnormal)} are subnormal, ${percent(found.overflow)} overflow`,
    );
    draw(histogram, format, exponent);
  }

  histograms.forEach((each, index) => byId("histogram").add(new Option(each.title, index)));
  Object.keys(formats).forEach((name) => byId("format").add(new Option(name.replace("_", " "), name)));
  for (const name of ["histogram", "format", "exponent"]) byId(name).addEventListener("input", update);
  byId("best").addEventListener("click", () => {
    byId("exponent").value = byId("best").dataset.exponent; // the input keeps it within its own limits
    update();
  });
  new ResizeObserver(update).observe(byId("picture"));
  update();
})();
