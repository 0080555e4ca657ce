// The name of a job for people.
import {texts, withoutTags} from "../../kit.js"

const t = texts.queue

/** @param {Job} job */
export function titleOf(job) {
	if (job.operation === "train") return t.training(String(job.settings.name ?? ""))
	return withoutTags(job.settings.prompt ?? "") || t.noPrompt
}
