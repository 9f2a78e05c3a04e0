// The page itself: reads the embedded data and builds the sections. All text is set as text.
"use strict";

const page = JSON.parse(document.getElementById("data").textContent);
const runs = page.runs;
const main = document.getElementById("main");
const [VALIDATION, TRAINING] = [0, 1]; // colours of a single run's curves
const MOST_CLASSES = 40; // that a confusion matrix has room for

const COLORS = 6; // of the style sheet; further runs get hues far from each other
const color = (k) => (k < COLORS ? `var(--c${k})` : `hsl(${(k * 137.5) % 360} 65% 50%)`);
const several = runs.length > 1;
const phone = matchMedia("(max-width: 34rem)").matches;
const byMethod = new Set(runs.map((run) => run.method)).size > 1;
const label = (run) => (byMethod && !run.name.includes(run.method)
  ? `${run.name} (${run.method})` : run.name);
const metricName = (metric) => (metric === "r2" ? "R²" : metric);
const metricFormat = (metric) => (metric === "r2" ? short : percent);
const grouped = (value) => value.toLocaleString("en"); // 10,000
const seconds = (value) => `${short(value)} s`;
const epochNumber = (value) => `epoch ${value}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const note = (text) => make("p", { class: "note" }, text);

/** A section with a heading that the contents at the top link to. */
function section(id, title, ...children) {
  const heading = make("h2", { id }, title);
  main.append(make("section", { "aria-labelledby": id }, heading, ...children));
}

/** A part below a heading that can be folded away, as it is on a phone. */
function part(heading, ...children) {
  return make("details", { class: "part", open: phone ? null : "" },
    make("summary", {}, heading), ...children);
}

/** A whole section of that kind. */
function foldedSection(id, title, ...children) {
  main.append(make("section", { "aria-labelledby": id }, part(make("h2", { id }, title), ...children)));
}

function swatch(k) {
  return make("span", { class: "swatch", "aria-hidden": "true", style: { background: color(k) } });
}

/** A table with a caption; a row is a list of texts, numbers or elements, the first its name. */
function table(caption, head, rows, options = {}) {
  const numeric = (k) => rows.some((row) => typeof row[k] === "number");
  const cell = (value, k) => make(k ? "td" : "th", {
    scope: k ? null : "row", class: numeric(k) ? "number" : null },
  typeof value === "number" ? (options.formats?.[k] ?? short)(value) : value ?? "–");
  const body = make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map(cell))));
  const header = make("tr", {}, ...head.map((name, k) => make("th",
    { scope: "col", class: numeric(k) ? "number" : null }, name)));
  const made = make("table", { class: options.class ?? null },
    make("caption", {}, caption), make("thead", {}, header), body);
  return make("div", { class: "wide", tabindex: 0, role: "region", "aria-label": caption }, made);
}

/** Let the headers of a table sort its rows: up on the first click, down on the next. */
function sortable(wrapped, rows) {
  const body = wrapped.querySelector("tbody");
  const lines = [...body.rows];
  const headers = [...wrapped.querySelectorAll("thead th")];
  headers.forEach((header, k) => {
    const button = make("button", { type: "button" }, header.textContent);
    header.replaceChildren(button);
    button.addEventListener("click", () => {
      const sign = header.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      headers.forEach((other) => other.removeAttribute("aria-sort"));
      header.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const order = rows.map((_, i) => i).sort((i, j) => compare(rows[i][k], rows[j][k], sign));
      body.replaceChildren(...order.map((i) => lines[i]));
    });
  });
  return wrapped;
}

/** Less than zero if a comes first; what is missing comes last, up and down. */
function compare(a, b, sign) {
  if (a == null || b == null) return (a == null) - (b == null);
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), undefined, { numeric: true });
}

// ---- the results in large figures

function card(k, name, figure, ...lines) {
  return make("article", { class: "card", style: { borderTopColor: color(k) } },
    make("h3", {}, name), make("p", { class: "score" }, figure),
    ...lines.map((line) => make("p", { class: "quiet" }, line)));
}

/** One card per run; a single run gets one per part of its data, in the colour of its curve. */
function cards() {
  const figure = (run, part) => (!part ? "–" : run.metric === "r2" ? part.score.toFixed(4)
    : percentOf(2)(part.score));
  if (several) {
    main.append(make("div", { class: "cards" }, ...runs.map((run, k) => card(k, run.name,
      figure(run, run.results.test), `test ${metricName(run.metric)} on ${run.data}`,
      ...run.summary))));
    return;
  }
  const [run] = runs;
  const parts = [["test", "Test", 2], ["validation", "Validation", VALIDATION],
    ["train", "Training", TRAINING]].filter(([part]) => run.results[part]);
  main.append(make("p", {}, `${capital(run.summary.join("; "))}.`), make("div", { class: "cards parts" },
    ...parts.map(([part, name, k]) => card(k, `${name} ${metricName(run.metric)}`,
      figure(run, run.results[part]), `${grouped(run.results[part].rows)} rows of ${run.data}`,
      `loss ${short(run.results[part].loss)}`))));
}

// ---- curves over epochs and seconds

let plotCount = 0;

function plot(options, curves) {
  plotCount += 1;
  return new Plot({ id: plotCount, ...options }, curves);
}

/** Training and validation values of one column, for every run that has them. */
function curvesOf(column, abscissa, chosen) {
  const curves = [];
  runs.forEach((run, k) => {
    if (!chosen(run)) return;
    const { history } = run;
    for (const [prefix, what] of [["validation_", "validation"], ["", "training"]]) {
      const y = history[prefix + column];
      if (!y || y.every((value) => value === null)) continue;
      const validation = what === "validation";
      curves.push({
        name: several ? `${label(run)}, ${what}` : what,
        width: 2 + Math.min(2 * (runs.length - 1 - k), 6), // so that the last hides none below it
        x: history[abscissa], y,
        color: several ? color(k) : color(validation ? VALIDATION : TRAINING),
        dash: validation ? null : "6 4",
      });
    }
  });
  return curves;
}

function learningCurves() {
  if (!runs.some((run) => run.history.epoch.length)) {
    section("curves", "Learning curves", note("No epoch was finished: there are no curves."));
    return;
  }
  const plots = [];
  const overEpochs = { xLabel: "epoch", whole: true, xFormat: epochNumber };
  const overSeconds = { xLabel: "seconds of training", xFormat: seconds };
  for (const metric of new Set(runs.map((run) => run.metric))) {
    const chosen = (run) => run.metric === metric;
    const format = metricFormat(metric), name = metricName(metric);
    plots.push(
      plot({ title: `${capital(name)} per epoch`, format, ...overEpochs },
        curvesOf("score", "epoch", chosen)),
      plot({ title: `${capital(name)} over time`, format, ...overSeconds },
        curvesOf("score", "elapsed", chosen)));
  }
  plots.push(
    plot({ title: "Loss", log: true, ...overEpochs }, curvesOf("loss", "epoch", () => true)),
    plot({ title: "Objective of a fixed batch", log: true, ...overEpochs },
      curvesOf("objective", "epoch", () => true)
        .map((curve) => ({ ...curve, dash: null, name: curve.name.replace(/,? ?training$/, "") ||
          "objective" }))));
  section("curves", "Learning curves",
    make("p", { class: "quiet screen" }, "Point at a curve to read its values, drag to zoom in, " +
      "double-click (or Escape) to see all of it again. Names below a plot switch curves off."),
    make("p", { class: "quiet" }, "Loss and objective are per sample, on a logarithmic axis."),
    make("div", { class: "plots" }, ...plots.map((made) => made.element)));
}

// ---- gaps and rates, layer by layer

function layerColor(i, count) {
  const share = count > 1 ? i / (count - 1) : 0;
  const [from, to, part] = share < 0.5 ? ["low", "middle", 2 * share]
    : ["middle", "high", 2 * share - 1];
  return `color-mix(in oklab, var(--${from}), var(--${to}) ${Math.round(100 * part)}%)`;
}

function layerCurves(column, choice) {
  if (choice.layer === undefined) {
    const { history } = runs[choice.run];
    return history[column].map((y, i) => ({ name: `layer ${i + 1}`, x: history.epoch, y,
      color: layerColor(i, history[column].length) }));
  }
  return runs.map((run, k) => ({ name: label(run), x: run.history.epoch,
    y: run.history[column][choice.layer], color: color(k) })).filter((curve) => curve.y);
}

function layers() {
  const withGaps = runs.map((run, k) => k).filter((k) => runs[k].history.gaps.flat().some((gap) => gap > 0));
  if (!withGaps.length) {
    const why = runs.some((run) => run.history.epoch.length)
      ? "the states of such a method are feed-forward." : "no epoch was finished.";
    section("layers", "Layers", note(`No gaps to show: ${why}`));
    return;
  }
  const choices = withGaps.map((k) => ({ run: k, text: `${runs[k].name}, all layers` }));
  if (several) {
    const depth = Math.max(...withGaps.map((k) => runs[k].history.gaps.length));
    for (let i = 0; i < depth; i += 1) choices.push({ layer: i, text: `layer ${i + 1}, all runs` });
  }
  const options = { xLabel: "epoch", whole: true, xFormat: epochNumber, log: true };
  const gaps = plot({ title: "Gap per sample", ...options }, layerCurves("gaps", choices[0]));
  const rates = plot({ title: "Contraction rate", mark: 1, ...options }, layerCurves("rates", choices[0]));
  const children = [make("p", { class: "quiet" }, "A layer's gap is zero when its states are what " +
    "the network computes. Below a rate of 1 many plain sweeps over the states would come to " +
    "rest by themselves. One sweep a step, the default, also trains well above it, and the safe " +
    "step does in any case.")];
  if (several) {
    const select = make("select", { id: "layer-choice" },
      ...choices.map((choice, k) => make("option", { value: k }, choice.text)));
    select.addEventListener("change", () => {
      const choice = choices[Number(select.value)];
      gaps.show(layerCurves("gaps", choice));
      rates.show(layerCurves("rates", choice));
    });
    children.push(make("p", { class: "choice" },
      make("label", { for: "layer-choice" }, "Show "), select));
  }
  foldedSection("layers", "Layers", ...children,
    make("div", { class: "plots" }, gaps.element, rates.element));
}

// ---- what one run got right and wrong

function confusion(test) {
  const { classes, counts } = test;
  const totals = counts.map((row) => row.reduce((a, b) => a + b, 0));
  const worst = Math.max(1, ...counts.flatMap((row, i) => row.filter((_, j) => j !== i)));
  const output = make("output", { class: "screen" }, "Point at a field, or go through them with Tab.");
  const long = classes.some((name) => name.length > 3);
  const rows = counts.map((row, i) => make("tr", {},
    make("th", { scope: "row", title: classes[i] }, classes[i]),
    ...row.map((count, j) => {
      const right = i === j;
      const share = right ? count / Math.max(totals[i], 1) : count / worst;
      const text = `True ${classes[i]}, predicted ${classes[j]}: ${count} of ${totals[i]} ` +
        `(${percent(count / Math.max(totals[i], 1))})`;
      const cell = make("td", { class: count ? null : "zero", title: text,
        tabindex: count ? 0 : null }, String(count));
      if (count) cell.style.background = `rgb(var(--${right ? "right" : "wrong"}) / ${
        (0.12 + 0.5 * share).toFixed(3)})`;
      for (const event of ["pointerenter", "focus"]) {
        cell.addEventListener(event, () => output.replaceChildren(text));
      }
      return cell;
    })));
  const up = (name) => (long ? make("div", { class: "up" }, name) : name);
  return make("div", { class: classes.length > 15 ? "confusion many" : "confusion" },
    make("table", {},
      make("caption", {}, "Rows are true classes, columns predictions. Blue is right, orange wrong."),
      make("thead", {}, make("tr", {}, make("td", { style: { width: long ? "6.5em" : "2.6em" } }),
        ...classes.map((name) => make("th", { scope: "col", title: name }, up(name))))),
      make("tbody", {}, ...rows)),
    output);
}

function recallTable(test) {
  const { classes, counts } = test;
  const rows = classes.map((name, i) => {
    const n = counts[i].reduce((a, b) => a + b, 0);
    const said = counts.reduce((sum, row) => sum + row[i], 0);
    const others = counts[i].map((count, j) => (j === i ? 0 : count));
    const most = Math.max(...others);
    return [name, n, n ? counts[i][i] / n : null, said ? counts[i][i] / said : null,
      most ? `${classes[others.indexOf(most)]} (${most})` : "–"];
  });
  const head = ["class", "samples", "recall", "precision", "taken for"];
  const formats = { 1: grouped, 2: percentOf(1), 3: percentOf(1) };
  const made = table("Recall and precision of each class", head, rows, { formats, class: "recall" });
  return sortable(made, rows);
}

function mistakes(test) {
  if (!test.n_wrong) return [note("No sample of the test rows was mistaken.")];
  const shown = test.mistakes.length;
  const which = `${grouped(test.n_wrong)} of ${grouped(test.n)} test rows are wrong; ${
    shown === test.n_wrong ? "all of them" : `the ${shown} most confident ones`}`;
  const name = (k) => test.classes[k];
  if (!test.columns.length) {
    const item = (mistake) => {
      const sure = percentOf(1)(mistake.share);
      const turn = `${name(mistake.truth)} → ${name(mistake.said)}`;
      const words = `Test row ${mistake.number}: ${turn}, with ${sure}`;
      return make("li", {}, make("img", { src: mistake.picture, alt: words, title: words }),
        make("span", {}, turn), make("span", { class: "quiet" }, sure));
    };
    return [make("p", { class: "quiet" }, `${which}, true class → prediction, with its probability:`),
      make("ul", { class: "pictures mistakes" }, ...test.mistakes.map(item))];
  }
  const rows = test.mistakes.map((mistake) => [mistake.number, name(mistake.truth),
    name(mistake.said), mistake.share, ...mistake.cells]);
  return [make("p", { class: "quiet" }, `${which}, with what stands in ${mattering(test)}:`),
    sortable(table("Wrong rows", ["row", "true", "predicted", "probability", ...test.columns], rows,
      { class: "rows", formats: { 0: grouped, 3: percentOf(1) } }), rows)];
}

const mattering = (test) => (test.columns.length < test.n_columns
  ? `the ${test.columns.length} columns that matter most` : "their columns");

/** Two plots about thresholds, and one about probabilities. */
function probabilities(test) {
  const shared = { format: percent, xFormat: percent };
  const curves = (field, value) => test.curves.map((curve, k) => ({ plain: true, color: color(k),
    name: `${test.classes[curve.class]} (${short(Number(curve[value].toFixed(3)))})`, ...curve[field] }));
  const straight = { name: "chance", x: [0, 1], y: [0, 1], dash: "2 4", plain: true,
    color: "var(--quiet)" };
  const { calibration } = test;
  const plots = [
    plot({ title: "How sure, and how often right", xLabel: "probability of the answer", ...shared },
      [{ name: "right answers", x: calibration.sure, y: calibration.right, color: color(0) },
        { ...straight, name: "calibrated", x: [calibration.sure[0], 1], y: [calibration.sure[0], 1] }]),
  ];
  if (test.curves.length) {
    plots.unshift(
      plot({ title: "ROC curve (area)", xLabel: "share of others taken for it", ...shared },
        [...curves("roc", "auc"), straight]),
      plot({ title: "Precision and recall (average precision)", xLabel: "recall", ...shared },
        curves("precision_recall", "average_precision")));
  }
  return [make("p", { class: "quiet" }, "Left to right: every threshold on the probability " +
    `${test.classes.length > 2 ? "of one class against the rest" : `of ${test.classes[1]}`}, and ` +
    "how far probabilities can be trusted: answers that are 80 % sure should be right in 80 % of " +
    `the rows. The mean distance from that is ${percent(Number(calibration.error.toFixed(3)))}.`),
  make("div", { class: "plots" }, ...plots.map((made) => made.element))];
}

/** Predicted against true, residuals, errors in units and the worst rows of one target. */
function numbersOf(target, test) {
  const order = target.truth.map((_, i) => i).sort((i, j) => target.truth[i] - target.truth[j]);
  const truth = order.map((i) => target.truth[i]), said = order.map((i) => target.said[i]);
  const bySaid = order.map((_, i) => i).sort((i, j) => said[i] - said[j]);
  const [low, high] = [truth[0], truth.at(-1)];
  const rows = target.mistakes.map((mistake) => [mistake.number, mistake.truth, mistake.said,
    mistake.said - mistake.truth, ...mistake.cells]);
  return [
    ...(test.targets.length > 1 ? [make("h3", {}, target.name)] : []),
    make("div", { class: "plots" },
      plot({ title: "Predicted against true", xLabel: `true ${target.name}` },
        [{ name: "test rows", x: truth, y: said, points: true, color: color(0) },
          { name: "as they should be", x: [low, high], y: [low, high], dash: "2 4", plain: true,
            color: "var(--quiet)" }]).element,
      plot({ title: "Residuals", xLabel: `predicted ${target.name}`, mark: 0 },
        [{ name: "predicted − true", points: true, color: color(1), x: bySaid.map((i) => said[i]),
          y: bySaid.map((i) => said[i] - truth[i]) }]).element),
    table(`Errors, in units of ${target.name}`, ["", "test rows"], Object.entries(target.errors),
      { class: "errors" }),
    part(make("h3", {}, "Worst rows"),
      make("p", { class: "quiet" }, `The ${rows.length} largest errors of ${grouped(target.n)} test ` +
        `rows, with what stands in ${mattering(test)}.`),
      sortable(table("Worst rows", ["row", "true", "predicted", "error", ...test.columns], rows,
        { class: "rows", formats: { 0: grouped } }), rows)),
  ];
}

function labelTable(test) {
  const rows = test.labels.map((label) => [label.name, label.rows, label.recall, label.precision]);
  return table("Labels on the test rows", ["label", "rows", "recall", "precision"], rows,
    { formats: { 1: grouped, 2: percentOf(1), 3: percentOf(1) } });
}

/** What is lost when a column is shuffled, as bars. */
function importance(test, metric) {
  const most = Math.max(...test.importances.map((column) => column.lost), 1e-12);
  const format = metric === "r2" ? (value) => value.toFixed(3) : percentOf(1);
  const line = (column) => make("tr", {}, make("th", { scope: "row" }, column.name),
    make("td", { class: "number" }, `${format(column.lost)} ± ${format(column.spread)}`),
    make("td", { class: "bar" }, make("i", { style: {
      width: `${100 * Math.max(column.lost, 0) / most}%` } })));
  const shown = test.importances.length;
  return [make("p", { class: "quiet" }, `${capital(metricName(metric))} lost on the test rows when the values of one column are shuffled, ` +
    `mean and standard deviation of five times${
      shown < test.n_columns ? `; the ${shown} largest of ${test.n_columns} columns` : ""}.`),
  make("div", { class: "wide" }, make("table", { class: "importance" },
    make("caption", {}, "Importance of columns"), make("tbody", {}, ...test.importances.map(line))))];
}

/** Scores of the run beside those of an answer that is always the same. */
function scores(run) {
  const { baseline } = run.results.test;
  if (!baseline) return [];
  const rows = Object.keys(baseline).filter((name) => name !== "answer").map((name) =>
    [name, scoreFormat(name)(run.results.test[name]), scoreFormat(name)(baseline[name])]);
  return [table(`Scores on the test rows${run.metric === "r2" ? `, errors in units of ${run.target}` : ""}`,
    ["", "this run", baseline.answer], rows, { class: "scores" })];
}

const scoreFormat = (name) => (name.endsWith("accuracy") ? percentOf(2) : short);

/** All runs in a table that its headers sort. */
function sideBySide() {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.results.test)))]
    .filter((name) => !["rows", "loss", "score", "baseline"].includes(name));
  const head = ["run", "method", ...names, "test loss", "epochs", "seconds"];
  const rows = runs.map((run) => [run.name, run.method,
    ...names.map((name) => run.results.test[name] ?? null), run.results.test.loss,
    run.history.epoch.length, run.seconds]);
  const formats = [null, null, ...names.map(scoreFormat), short, grouped, short];
  section("results", "Side by side",
    make("p", { class: "quiet" }, "On the test rows. Click a header to sort."),
    sortable(table("Results of all runs", head, rows, { formats, class: "rows" }), rows));
}

function weightPictures(weights) {
  const limit = short(weights.limit);
  const gradient = `linear-gradient(90deg, ${weights.scale.join(", ")})`;
  return [
    make("p", { class: "quiet" }, `What ${weights.units.length === weights.count ? "each unit"
      : `${weights.units.length} of ${weights.count} units, those with the largest weights,`} ` +
      `of the first layer look${weights.units.length === weights.count ? "s" : ""} at.`),
    make("ul", { class: "pictures units" }, ...weights.units.map((unit) => make("li", {},
      make("img", { src: unit.picture, alt: `Weights of unit ${unit.unit + 1}`,
        title: `unit ${unit.unit + 1}` })))),
    weights.scale.length
      ? make("p", { class: "scale" }, `−${limit}`,
        make("i", { style: { background: gradient } }), limit)
      : make("p", { class: "scale" }, `Grey is 0; a channel is dark at −${limit}, full at ${limit}.`),
  ];
}

function runDetails(run, k) {
  const title = several ? [swatch(k), " ", run.name] : ["Test rows"];
  const parts = [];
  parts.push(...scores(run));
  if (run.test.note) parts.push(note(run.test.note));
  else if (run.test.kind === "numbers") {
    parts.push(...run.test.targets.flatMap((target) => numbersOf(target, run.test)));
  } else if (run.test.kind === "labels") parts.push(labelTable(run.test));
  else {
    parts.push(make("div", { class: "pair" },
      make("div", {}, make("h3", {}, "Confusion matrix"),
        run.test.classes.length <= MOST_CLASSES ? confusion(run.test)
          : note(`A matrix of ${run.test.classes.length} classes would be too large to read.`)),
      part(make("h3", {}, "Classes"),
        make("p", { class: "quiet" }, "Recall is the share of a class that was found, precision " +
          "the share of its predictions that are right. Click a header to sort."),
        recallTable(run.test))),
    part(make("h3", {}, "Worst mistakes"), ...mistakes(run.test)),
    part(make("h3", {}, "Probabilities"), ...probabilities(run.test)));
  }
  if (run.test.importances?.length) {
    parts.push(part(make("h3", {}, "Importance of columns"), ...importance(run.test, run.metric)));
  }
  if (run.weights) {
    parts.push(part(make("h3", {}, "First-layer weights"),
      ...(run.weights.note ? [note(run.weights.note)] : weightPictures(run.weights))));
  }
  parts.push(epochTable(run));
  section(`run-${k + 1}`, "", ...parts);
  document.getElementById(`run-${k + 1}`).append(...title);
}

function epochTable(run) {
  const { history } = run, name = metricName(run.metric), format = metricFormat(run.metric);
  const columns = [["epoch", history.epoch], ["seconds", history.elapsed],
    ["objective", history.objective], ["loss", history.loss], [name, history.score],
    ["validation loss", history.validation_loss], [`validation ${name}`, history.validation_score],
  ].filter(([, values]) => values.some((value) => value !== null));
  const rows = history.epoch.map((_, i) => columns.map(([, values]) => values[i]));
  const formats = columns.map(([title]) => (title.endsWith(name) ? format : short));
  return make("details", {}, make("summary", {}, "All epochs as a table"),
    table(`Epochs of ${run.name}; loss and objective per sample.`, columns.map(([title]) => title),
      rows, { formats }));
}

// ---- tables over all runs

/** Named values of every run side by side, one table a group; `marked` says where they differ. */
function comparisons(id, title, field, marked) {
  const mark = several && marked;
  const named = (group) => {
    const values = runs.map((run) => run[field][group] ?? {});
    const names = [...new Set(values.flatMap(Object.keys))];
    const rows = names.map((name) => [name, ...values.map((own) => own[name] ?? "–")]);
    const head = several ? ["", ...runs.map((run) => run.name)] : ["", "value"];
    const made = table(capital(group), head, rows, { class: several ? "named compared" : "named" });
    [...made.querySelectorAll("tbody tr")].forEach((line, i) => {
      if (mark && new Set(rows[i].slice(1)).size > 1) line.classList.add("differs");
    });
    return made;
  };
  const groups = [...new Set(runs.flatMap((run) => Object.keys(run[field])))];
  foldedSection(id, title,
    ...(mark ? [make("p", { class: "quiet" }, "≠ marks what differs.")] : []),
    make("div", { class: several ? "stack" : "columns" }, ...groups.map(named)));
}

function contents() {
  const links = [...main.querySelectorAll("h2")].map((heading) =>
    make("li", {}, make("a", { href: `#${heading.id}` }, heading.textContent.trim())));
  document.getElementById("contents").append(make("ul", {}, ...links));
}

cards();
if (several) sideBySide();
learningCurves();
layers();
runs.forEach(runDetails);
comparisons("settings", "Settings", "settings", true);
comparisons("timings", "Timings", "timings", false);
contents();
